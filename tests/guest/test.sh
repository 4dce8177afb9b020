#!/usr/bin/env bash
# test.sh DIR PYTHON: the tests that need an RDMA device, in the guest. Where there can be none,
# it says why and succeeds.
set -euo pipefail
cd "$(dirname "$0")/../.."
dir=${1:?usage: test.sh DIR PYTHON}
python=$(realpath -s "${2:?usage: test.sh DIR PYTHON}")
code=0
tests/guest/setup.sh "$dir" || code=$?
if [ $code = 77 ]; then
  echo "the RDMA tests are skipped"
  exit 0
fi
[ $code = 0 ] || exit $code
pytest="$(printf %q "$python") -m pytest -p no:cacheprovider"
# TRANSPORT: the suite that all transports pass runs on these, and a missing device is a failure.
# The first files do without what conftest.py imports, which takes the guest a while.
first="tests/transport/test_transport.py tests/transport/test_peers.py tests/transport/test_rdma.py"
command="export TRANSPORT=rdma,rdma-polled; $pytest --noconftest $first"
rest=$(grep -rl 'mark\.rdma' tests --include='test_*.py' | grep -v tests/transport/test_rdma.py || true)
[ -z "$rest" ] || command+=" && $pytest -m rdma $(echo $rest)"
exec tests/guest/run.sh -t 400 "$dir" "$command"
