#!/usr/bin/env bash
# setup.sh DIR: what run.sh needs, into DIR: a stock Debian kernel, unpacked, and an initial file
# system with busybox and the modules for virtio, 9p, overlay and soft-RoCE. Missing Debian
# packages are installed where this is root. Half a minute the first time, nothing after it.
# Exit 77: it cannot be done on this machine, for the reason printed.
set -euo pipefail
here=$(readlink -f "$(dirname "$0")")
mkdir -p "${1:?usage: setup.sh DIR}"
dir=$(readlink -f "$1")
packages=(qemu-system-x86 busybox-static kmod cpio iproute2 ibverbs-utils ibverbs-providers
  rdma-core python3-pyverbs)

cannot() {
  echo "no guest: $*"
  exit 77
}

[ "$(uname -m)" = x86_64 ] || cannot "the guest is x86-64, this machine is $(uname -m)"
command -v dpkg-query > /dev/null || cannot "Debian's packages are needed, and there is no dpkg"
missing=()
for package in "${packages[@]}"; do
  [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2> /dev/null)" = installed ] ||
    missing+=("$package")
done
log=$dir/setup.log
: > "$log"
if [ ${#missing[@]} -gt 0 ]; then
  install="apt-get install --no-install-recommends ${missing[*]}"
  [ "$(id -u)" = 0 ] || cannot "packages are missing, and only root can install them: $install"
  echo "guest: $install"
  { apt-get update -q && DEBIAN_FRONTEND=noninteractive $install -y -q; } >> "$log" 2>&1 ||
    cannot "the packages could not be installed, see $log"
fi

if [ ! -f "$dir/version" ]; then
  image=$(apt-cache depends linux-image-amd64 2>> "$log" |
    sed -n 's/.*Depends: \(linux-image-[0-9].*\)/\1/p' | head -1)
  [ -n "$image" ] || cannot "apt knows no linux-image-amd64 (apt-get update?)"
  rm -rf "$dir/kernel" "$dir/packages"
  mkdir "$dir/packages"
  echo "guest: downloading $image"
  # as root, apt hands downloads to a user who may not write here, and says so at length
  (cd "$dir/packages" && apt-get -o APT::Sandbox::User=root download "$image") >> "$log" 2>&1 ||
    cannot "$image could not be downloaded, see $log"
  dpkg -x "$dir"/packages/linux-image-*.deb "$dir/kernel"
  rm -r "$dir/packages"
  version=$(ls "$dir/kernel/lib/modules")
  depmod=$(PATH=$PATH:/usr/sbin:/sbin command -v depmod)
  "$depmod" -b "$dir/kernel" "$version"
  echo "$version" > "$dir/version"
fi

# Made anew when `init` has changed.
if [ ! "$dir/initramfs.gz" -nt "$here/init" ] || [ ! "$dir/initramfs.gz" -nt "$here/setup.sh" ]; then
  version=$(< "$dir/version")
  modprobe=$(PATH=$PATH:/usr/sbin:/sbin command -v modprobe)
  root=$(mktemp -d)
  trap 'rm -rf "$root"' EXIT
  mkdir -p "$root"/{bin,dev,proc,sys,modules}
  cp "$(command -v busybox)" "$root/bin/busybox"
  install -m 755 "$here/init" "$root/init"
  # dependencies first; a module that is built in has no file
  for module in virtio_pci 9pnet_virtio 9p overlay virtio_rng crc32_generic crc32c_generic \
    crc32_pclmul crc32c_intel dummy veth rdma_rxe rdma_ucm ib_uverbs; do
    "$modprobe" -d "$dir/kernel" -S "$version" --show-depends "$module" 2> /dev/null |
      awk '$1 == "insmod" { print $2 }'
  done | awk '!seen[$0]++' | while read -r file; do
    cp "$file" "$root/modules/"
    basename "$file"
  done > "$root/order"
  (cd "$root" && find . | cpio -o -H newc --quiet | gzip -1) > "$dir/initramfs.part"
  mv "$dir/initramfs.part" "$dir/initramfs.gz"
fi
