#!/usr/bin/env bash
# run.sh [-t SECONDS] DIR COMMAND...: runs the command, by bash and in this folder, inside the
# guest that setup.sh prepared in DIR. The guest sees this machine's files; what it writes is
# gone afterwards. It has one soft-RoCE device, rxe0, on 127.77.0.1. The command's exit code is
# ours; 98: the guest did not finish within the time, or died.
#
# One CPU on purpose: with more, threads that poll keep the soft interrupts of rxe waiting.
# GUEST_ACCEL=kvm where the host's KVM boots a stock kernel (nested ones often do not);
# GUEST_MEMORY in MiB.
set -euo pipefail
limit=120
if [ "${1:-}" = -t ]; then
  limit=$2
  shift 2
fi
dir=$(readlink -f "${1:?usage: run.sh [-t SECONDS] DIR COMMAND...}")
shift
accel=${GUEST_ACCEL:-tcg}
job=$(mktemp -d)
trap 'rm -rf "$job"' EXIT

cat > "$job/run" <<'JOB'
exec 2>&1 < /dev/null
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
export PYTHONDONTWRITEBYTECODE=1
ulimit -l unlimited
ip link add roce0 type dummy
ip address add 127.77.0.1/24 dev roce0
ip link set roce0 mtu 9000 up
rdma link add rxe0 type rxe netdev roce0
gids=/sys/class/infiniband/rxe0/ports/1/gids
for _ in $(seq 100); do
  grep -qs '7f4d:0001$' $gids/* && break
  sleep 0.05
done
JOB
{
  echo "cd $(printf %q "$PWD")"
  echo "( $* )"
  echo 'echo $? > /mnt/job/code'
} >> "$job/run"

version=$(< "$dir/version")
cpu=max
[ "$accel" = kvm ] && cpu=host,-arch-capabilities
timeout "$limit" qemu-system-x86_64 -accel "$accel" -cpu "$cpu" -smp 1 -m "${GUEST_MEMORY:-3072}" \
  -nodefaults -nographic -no-reboot -serial stdio -monitor none \
  -kernel "$dir/kernel/boot/vmlinuz-$version" -initrd "$dir/initramfs.gz" \
  -append "console=ttyS0 quiet panic=-1 mitigations=off" \
  -fsdev "local,id=host,path=/,security_model=none,readonly=on,multidevs=remap" \
  -device virtio-9p-pci,fsdev=host,mount_tag=host \
  -fsdev "local,id=job,path=$job,security_model=none" \
  -device virtio-9p-pci,fsdev=job,mount_tag=job \
  -device virtio-rng-pci < /dev/null 2>&1 |
  sed -u -e 's/\x1b[^a-zA-Z]*[a-zA-Z]//g' -e 's/\r//g' \
    -e '/^SeaBIOS/d' -e 's/^Booting from ROM\.\.//' -e '/reboot: Power/d' || true

[ -s "$job/code" ] || {
  echo "the guest did not finish within ${limit} s"
  exit 98
}
exit "$(cat "$job/code")"
