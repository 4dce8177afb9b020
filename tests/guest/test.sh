#!/usr/bin/env bash
# test.sh DIR PYTHON: the tests that need an RDMA device, in the guest. Where there can be none,
# it says why and succeeds.
set -euo pipefail
here=$(dirname "$0")
dir=${1:?usage: test.sh DIR PYTHON}
python=$(realpath -s "${2:?usage: test.sh DIR PYTHON}")
code=0
"$here/setup.sh" "$dir" || code=$?
if [ $code = 77 ]; then
  echo "the RDMA tests are skipped"
  exit 0
fi
[ $code = 0 ] || exit $code
# -p no:cacheprovider: nothing is to be remembered of a machine that is gone afterwards
exec "$here/run.sh" -t 300 "$dir" "$(printf %q "$python") -m pytest -p no:cacheprovider -m rdma"
