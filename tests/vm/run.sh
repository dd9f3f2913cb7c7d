#!/bin/bash
# The sandbox suites in a virtual machine: what depends on the host's kernel, control groups and users
# is tried where they differ from yours. Emulated in software, so no /dev/kvm is needed; ten to twenty
# times slower than the machine it runs on.
#
#   tests/vm/run.sh                                     Debian 12: Linux 6.1, control groups of version 2
#   tests/vm/run.sh --kernel trixie                     a newer kernel below the same programs
#   tests/vm/run.sh --kernel bullseye --probe           Linux 5.10: too old; what a user is told
#   tests/vm/run.sh --arch arm64 --probe                aarch64 (cross-compiler: gcc-aarch64-linux-gnu)
#   tests/vm/run.sh --as "root service" --suites "contract/test_sandbox_contract.py" --select native
#
# --as    kinds of owners (all by default):
#         root      in a session's scope
#         container root in control groups of its own, as in a container that may write to them
#         service   uid 1000 in a service with Delegate=yes
#         scope     uid 1000, as by `systemd-run --user --scope`
#         session   uid 1000 after a log-in: no control group, 65,536 subordinate ids
#         plain     the same without subordinate ids
# --probe tries boxes and reports what the host can do; runs no suite.
# --command COMMAND  the same with a shell command of yours, for a closer look
# --expect-refusal  with --probe: passes if native boxes are refused in one line, to every owner.
#
# Needs root (to unpack a root file system with its owners) and the packages
#   qemu-system-x86 (or -arm), mmdebstrap, e2fsprogs, cpio, kmod, and a C compiler.
# Everything is below $BURNISH_VM_DIR and kept for the next run (1.5 GB); without it, in a temporary
# directory that is removed. $BURNISH_VM_MIRROR is a Debian mirror, $BURNISH_VM_PIP a pip command,
# $BURNISH_VM_CPUS (2) and $BURNISH_VM_MEMORY (2G) the machine's size.
# Exits with 1 if anything fails in the machine.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
repo=$(cd "$here/../.." && pwd)

arch=amd64 kernel=bookworm kinds="root container scope service session plain" suite_s=1500 refusal="" command="exec python3 /repo/probe.py"
suites="unit/sandbox/test_sandbox_cgroup.py contract/test_sandbox_contract.py contract/test_sandbox_escape.py
contract/test_sandbox_escape_resources.py contract/test_sandbox_limits_contract.py
contract/test_sandbox_state_contract.py contract/test_sandbox_native_leaks.py"
select="not remote and not oci and not gvisor and not runc and not sampled"
while [ $# -gt 0 ]; do
    case $1 in
    --arch) arch=$2 && shift ;;
    --kernel) kernel=$2 && shift ;;
    --as) kinds=$2 && shift ;;
    --suites) suites=$2 && shift ;;
    --select) select=$2 && shift ;;
    --suite-seconds) suite_s=$2 && shift ;;
    --probe) suites="" ;;
    --command) command=$2 suites="" && shift ;;
    --expect-refusal) refusal=1 ;;
    -h | --help) sed -n '2,/^set -/{/^set -/!s/^# \{0,1\}//p}' "$0" && exit 0 ;;
    *) echo "unknown option $1; see $0 --help" >&2 && exit 2 ;;
    esac
    shift
done
case $arch in
amd64) flavour=cloud-amd64 qemu=(qemu-system-x86_64 -machine q35 -cpu max) console=ttyS0 wheels=x86_64 cc=${CC:-cc} ;;
arm64) flavour=cloud-arm64 qemu=(qemu-system-aarch64 -machine virt -cpu cortex-a72) console=ttyAMA0 wheels=aarch64
    cc=${CC:-aarch64-linux-gnu-gcc} ;;
*) echo "unknown architecture $arch: amd64 or arm64" >&2 && exit 2 ;;
esac
[ "$(uname -m)" = $wheels ] && [ -z "${CC:-}" ] && cc=cc
for tool in "${qemu[0]}" mmdebstrap mke2fs cpio depmod "$cc"; do
    command -v "$tool" >/dev/null || { echo "$tool is missing; see $0 --help" >&2; exit 2; }
done
[ "$(id -u)" = 0 ] || { echo "needs root, to unpack a root file system" >&2; exit 2; }

if [ -n "${BURNISH_VM_DIR:-}" ]; then
    dir=$BURNISH_VM_DIR/$arch && mkdir -p "$dir"
    run=$(mktemp -d "$dir/run.XXXXXX")
    trap 'rm -rf "$run"' EXIT
else
    dir=$(mktemp -d) run=$dir/run && mkdir "$run"
    trap 'rm -rf "$dir"' EXIT
fi

# 1. Root file system, the same for all kernels.
if [ ! -e "$dir/root.done" ]; then
    rm -rf "$dir/root"
    # Unpacked only: programs of another architecture, such as packages' scripts, do not run here.
    mmdebstrap --quiet --architectures=$arch --variant=extract --aptopt='APT::Install-Recommends "false"' \
        --include='?essential' --include='mount,python3,bubblewrap,uidmap,crun,kmod,procps,iproute2,busybox-static' \
        --hook-dir=/usr/share/mmdebstrap/hooks/merged-usr bookworm "$dir/root" ${BURNISH_VM_MIRROR:-}
    rm -rf "$dir"/root/var/cache/apt/* "$dir"/root/var/lib/apt/lists/* "$dir"/root/usr/share/{doc,man,locale}
    printf '%s\n' root:x:0:0::/root:/bin/sh nobody:x:65534:65534::/:/bin/false user:x:1000:1000::/home/user:/bin/sh \
        >"$dir/root/etc/passwd"
    printf '%s\n' root:x:0: tty:x:5: nogroup:x:65534: user:x:1000: >"$dir/root/etc/group"
    mkdir -p "$dir/root/repo"
    # What the suites import. Not pyarrow: nothing of the sandbox does.
    ${BURNISH_VM_PIP:-python3 -m pip} install --quiet --target "$dir/root/opt/site" --only-binary :all: \
        --python-version 3.11 --implementation cp --platform manylinux_2_28_$wheels \
        --platform manylinux2014_$wheels -c "$repo/requirements.lock" \
        pydantic msgspec cyclopts rich jinja2 aiohttp markupsafe tomli-w pytest hypothesis
    touch "$dir/root.done"
fi

# 2. A kernel of that Debian release, and an initramfs with the modules that its disk needs.
if [ ! -e "$dir/$kernel.done" ]; then
    rm -rf "$dir/kernel-$kernel" && mkdir "$dir/kernel-$kernel"
    # With an apt of its own: the host's may know neither that release nor that architecture. Not
    # from the security archive, which drops packages of old releases.
    mmdebstrap --quiet --architectures=$arch --variant=extract --include=linux-image-$flavour \
        --aptopt='APT::Install-Recommends "false"' --setup-hook='sed -i /-security/d "$1"/etc/apt/sources.list' "$kernel" "$dir/kernel-$kernel/root" \
        ${BURNISH_VM_MIRROR:-} >"$run/kernel.log" 2>&1 || { cat "$run/kernel.log" >&2; exit 1; }
    mv "$dir/kernel-$kernel/root/boot" "$dir/kernel-$kernel/root"/{usr/,}lib/modules "$dir/kernel-$kernel/" 2>/dev/null || true
    [ -d "$dir/kernel-$kernel/modules" ]
    rm -rf "$dir/kernel-$kernel/root"
    touch "$dir/$kernel.done"
fi
modules=$(echo "$dir/kernel-$kernel/modules"/*)
version=${modules##*/}
tree=$run/initramfs
mkdir -p "$tree"/{bin,dev,proc,sys,mnt,lib/modules}
cp "$dir/root/bin/busybox" "$tree/bin/"
mkdir -p "$run/m/lib/modules" && cp -a "$modules" "$run/m/lib/modules/" && depmod -b "$run/m" "$version"
modprobe -d "$run/m" -S "$version" -a --show-depends virtio_pci virtio_blk virtio_mmio ext4 overlay 2>/dev/null |
    sed -n 's/^insmod //p' | awk '!seen[$1]++' >"$run/order"
number=100
while read -r module _; do
    number=$((number + 1))
    case $module in
    *.xz) xz -dc "$module" >"$tree/lib/modules/$number.ko" ;;
    *) cp "$module" "$tree/lib/modules/$number.ko" ;;
    esac
done <"$run/order"
cat >"$tree/init" <<'INIT'
#!/bin/busybox sh
/bin/busybox mkdir -p /dev /proc
/bin/busybox mount -t devtmpfs dev /dev
for module in /lib/modules/*.ko; do /bin/busybox insmod "$module"; done
/bin/busybox mount -t ext4 /dev/vda /mnt
/bin/busybox mount -t ext4 -o ro /dev/vdb /mnt/repo
/bin/busybox mount -o move /dev /mnt/dev
exec /bin/busybox switch_root /mnt /bin/sh /repo/init.sh
INIT
chmod +x "$tree/init"
(cd "$tree" && find . | cpio --quiet -o -H newc | gzip -1) >"$run/initrd"
rm -rf "$run/m" "$tree"

# 3. Disks: the root, the repository with the helper built for that machine, and room for results.
if [ ! -e "$dir/root.ext4" ] || [ "$dir/root.done" -nt "$dir/root.ext4" ]; then
    rm -f "$dir/root.ext4"
    mke2fs -q -t ext4 -E root_owner=0:0 -d "$dir/root" "$dir/root.ext4" 1500M
fi
mkdir "$run/repo"
cp -a "$repo/src" "$repo/tests" "$run/repo/"
cp "$here/init.sh" "$here/probe.py" "$run/repo/"
find "$run/repo" -name __pycache__ -prune -exec rm -rf {} +
rm -f "$run/repo/src/burnish/sandbox/native/_zygote"
CC=$cc python3 -c 'import runpy, sys; sys.exit(runpy.run_path(sys.argv[1])["build_helper"]())' \
    "$run/repo/src/burnish/sandbox/native/binary.py"
printf '%s\n' "$command" >"$run/repo/command.sh"
printf 'KINDS="%s"\nSUITES="%s"\nSELECT="%s"\nSUITE_S=%s\n' \
    "$kinds" "$(echo $suites)" "$select" "$suite_s" >"$run/repo/plan.sh"
chmod -R a+rX "$run/repo"
mke2fs -q -t ext4 -O ^has_journal -d "$run/repo" "$run/repo.ext4" 64M
truncate -s 64M "$run/results.tar"

# 4. Run it. The root disk is written to a file that is thrown away.
memory=${BURNISH_VM_MEMORY:-2G}
nice -n 10 "${qemu[@]}" -accel tcg,thread=multi -smp "${BURNISH_VM_CPUS:-2}" -m "$memory" -nographic -no-reboot -nic none \
    -kernel "$dir/kernel-$kernel/boot/vmlinuz-$version" -initrd "$run/initrd" \
    -append "console=$console quiet panic=-1 rdinit=/init systemd.unified_cgroup_hierarchy=1" \
    -drive "file=$dir/root.ext4,format=raw,if=virtio,snapshot=on" \
    -drive "file=$run/repo.ext4,format=raw,if=virtio,readonly=on" \
    -drive "file=$run/results.tar,format=raw,if=virtio" </dev/null | tee "$run/console"

# 5. Judge.
tar -C "$run" -xf "$run/results.tar" 2>/dev/null || { echo "the machine left no results" >&2; exit 1; }
if [ -n "${BURNISH_VM_DIR:-}" ]; then
    rm -rf "$dir/results-$kernel" && cp -a "$run/results" "$dir/results-$kernel"
    cp "$run/console" "$dir/results-$kernel/"
fi
failed=0
while read -r what code kind; do
    if [ -n "$refusal" ]; then [ "$code" = 3 ] || failed=1; else [ "$code" = 0 ] || failed=1; fi
    echo "$kind $what: exit $code"
done <"$run/results/codes"
exit $failed
