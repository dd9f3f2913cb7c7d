#!/bin/bash
# The sandbox suites in a virtual machine: what depends on the host's kernel, control groups and users
# is tried where they differ from yours. Emulated in software, so no /dev/kvm is needed; ten to twenty
# times slower than the machine it runs on.
#
#   tests/vm/run.sh                                     Debian 12: Linux 6.1, control groups of version 2
#   tests/vm/run.sh --kernel trixie                     a newer kernel below the same programs
#   tests/vm/run.sh --kernel bullseye --probe --expect-refusal   Linux 5.10: too old for native boxes
#   tests/vm/run.sh --arch arm64 --probe                aarch64 (cross-compiler: gcc-aarch64-linux-gnu)
#   tests/vm/run.sh --as "root service" --suites "contract/test_sandbox_contract.py" --select native
#
# --as KINDS         kinds of owners (all by default):
#    root       in a session's scope
#    container  root in control groups of its own, as in a container that may write to them
#    service    uid 1000 in a service with Delegate=yes
#    scope      uid 1000, as by `systemd-run --user --scope`
#    session    uid 1000 after a log-in: no control group, 65,536 subordinate ids
#    plain      the same without subordinate ids
# --suites PATHS     below tests/            --select EXPRESSION      pytest's -k
# --suite-seconds N  for each (1500)
# --probe            try boxes and report what the host can do; run no suite
# --command COMMAND  the same with a shell command of yours, for a closer look
# --expect-refusal   with --probe: passes if native boxes are refused in one line, to every owner
#
# Needs root (to unpack a root file system with its owners) and the packages
#   qemu-system-x86 (or qemu-system-arm), mmdebstrap, e2fsprogs, cpio, kmod, xz-utils, a C compiler.
# Everything is below $BURNISH_VM_DIR and kept for the next run (1.5 GB, logs in results-*); without it,
# in a temporary directory that is removed. $BURNISH_VM_MIRROR is a Debian mirror, $BURNISH_VM_PIP a pip
# command, $BURNISH_VM_CPUS (2) and $BURNISH_VM_MEMORY (2G) the size of the machine.
# Exits with 1 if anything fails in the machine, with 2 if it cannot be started.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
repo=$(cd "$here/../.." && pwd)
# Of all times: what hangs ends then.
longest=6h

usage() { sed -n '2,/^set -/{/^set -/!s/^# \{0,1\}//p}' "$0"; }
stop() { echo "$1; see $0 --help" >&2 && exit 2; }

parse() {
    arch=amd64 kernel=bookworm suite_s=1500 refusal="" command="exec python3 /repo/probe.py"
    kinds="root container scope service session plain"
    suites="unit/sandbox/test_sandbox_cgroup.py contract/test_sandbox_contract.py
        contract/test_sandbox_escape.py contract/test_sandbox_escape_resources.py
        contract/test_sandbox_limits_contract.py contract/test_sandbox_state_contract.py
        contract/test_sandbox_native_leaks.py"
    # The last: what bubblewrap takes to start is outside the share, and takes seconds here.
    select="not remote and not oci and not gvisor and not runc and not sampled
        and not (bubblewrap and share_of_a_processor)"
    while [ $# -gt 0 ]; do
        case $1 in
        --probe) suites="" && shift && continue ;;
        --expect-refusal) refusal=1 && shift && continue ;;
        -h | --help) usage && exit 0 ;;
        esac
        [ $# -ge 2 ] || stop "unknown option $1"
        case $1 in
        --arch) arch=$2 ;;
        --kernel) kernel=$2 ;;
        --as) kinds=$2 ;;
        --suites) suites=$2 ;;
        --select) select=$2 ;;
        --suite-seconds) suite_s=$2 ;;
        --command) command=$2 suites="" ;;
        *) stop "unknown option $1" ;;
        esac
        shift 2
    done
    case $arch in
    amd64)
        wheels=x86_64 console=ttyS0 cc=${CC:-cc}
        qemu=(qemu-system-x86_64 -machine q35 -cpu max)
        ;;
    arm64)
        wheels=aarch64 console=ttyAMA0 cc=${CC:-aarch64-linux-gnu-gcc}
        qemu=(qemu-system-aarch64 -machine virt -cpu cortex-a72)
        ;;
    *) stop "unknown architecture $arch: amd64 or arm64" ;;
    esac
    for tool in "${qemu[0]}" mmdebstrap mke2fs cpio depmod xz "$cc"; do
        command -v "$tool" >/dev/null || stop "$tool is missing"
    done
    [ "$(id -u)" = 0 ] || stop "needs root, to unpack a root file system"
}

debian() { mmdebstrap --quiet --architectures="$arch" --variant=extract --aptopt='APT::Install-Recommends "false"' "$@"; }

# Called as `log COMMAND...`: shows what it said only if it failed.
log() { "$@" >"$run/log" 2>&1 || { cat "$run/log" >&2 && exit 2; }; }

# The same for all kernels. Unpacked only: packages' scripts of another architecture do not run here.
unpack_root() {
    [ ! -e "$dir/root.ext4" ] || return 0
    root=$run/root
    log debian --include='?essential' \
        --include=mount,python3,bubblewrap,uidmap,crun,kmod,procps,iproute2,busybox-static \
        --hook-dir=/usr/share/mmdebstrap/hooks/merged-usr bookworm "$root" ${BURNISH_VM_MIRROR:+"$BURNISH_VM_MIRROR"}
    rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/usr/share/{doc,man,locale}
    printf '%s\n' root:x:0:0::/root:/bin/sh nobody:x:65534:65534::/:/bin/false \
        user:x:1000:1000::/home/user:/bin/sh >"$root/etc/passwd"
    printf '%s\n' root:x:0: tty:x:5: nogroup:x:65534: user:x:1000: >"$root/etc/group"
    mkdir -p "$root"/{dev,proc,sys,run,tmp,repo,home}
    # What the suites import. Not pyarrow: nothing of the sandbox does.
    log ${BURNISH_VM_PIP:-python3 -m pip} install --target "$root/opt/site" --only-binary :all: \
        --python-version 3.11 --implementation cp --platform "manylinux_2_28_$wheels" \
        --platform "manylinux2014_$wheels" -c "$repo/requirements.lock" \
        pydantic msgspec cyclopts rich jinja2 aiohttp markupsafe tomli-w pytest hypothesis
    mke2fs -q -t ext4 -d "$root" "$run/root.ext4" 1500M
    mv "$run/root.ext4" "$dir/root.ext4"
    cp "$root/bin/busybox" "$dir/busybox"
    rm -rf "$root"
}

# With an apt of its own: the host's may know neither that release nor that architecture. Not from the
# security archive, which drops packages of old releases.
unpack_kernel() {
    [ ! -e "$dir/kernel-$kernel" ] || return 0
    log debian --include="linux-image-cloud-$arch" \
        --setup-hook='sed -i /-security/d "$1"/etc/apt/sources.list' \
        "$kernel" "$run/kernel" ${BURNISH_VM_MIRROR:+"$BURNISH_VM_MIRROR"}
    mkdir "$run/kept" && mv "$run"/kernel/boot/vmlinuz-* "$run/kept/vmlinuz"
    for modules in "$run"/kernel/lib/modules "$run"/kernel/usr/lib/modules; do
        [ ! -d "$modules" ] || mkdir -p "$run/kept/lib"
        [ ! -d "$modules" ] || mv "$modules" "$run/kept/lib/"
    done
    depmod -b "$run/kept" "$(ls "$run/kept/lib/modules")"
    mv "$run/kept" "$dir/kernel-$kernel"
    rm -rf "$run/kernel"
}

# Loads what the disks need, and hands over to init.sh.
make_initramfs() {
    local tree=$run/initramfs number=100 module
    mkdir -p "$tree"/{bin,mnt,modules}
    cp "$dir/busybox" "$tree/bin/"
    modprobe -d "$dir/kernel-$kernel" -S "$(ls "$dir/kernel-$kernel/lib/modules")" -a --show-depends \
        virtio_pci virtio_blk virtio_mmio ext4 overlay 2>/dev/null | sed -n 's/^insmod //p' |
        awk '!seen[$1]++' >"$run/order" || true
    while read -r module _; do
        number=$((number + 1))
        case $module in
        *.xz) xz -dc "$module" >"$tree/modules/$number.ko" ;;
        *) cp "$module" "$tree/modules/$number.ko" ;;
        esac
    done <"$run/order"
    cat >"$tree/init" <<'INIT'
#!/bin/busybox sh
/bin/busybox mkdir -p /dev
/bin/busybox mount -t devtmpfs dev /dev
for module in /modules/*.ko; do /bin/busybox insmod "$module"; done
/bin/busybox mount -t ext4 /dev/vda /mnt
/bin/busybox mount -t ext4 -o ro /dev/vdb /mnt/repo
/bin/busybox mount -o move /dev /mnt/dev
exec /bin/busybox switch_root /mnt /bin/sh /repo/init.sh
INIT
    chmod +x "$tree/init"
    (cd "$tree" && find . | cpio --quiet -o -H newc | gzip -1) >"$run/initrd"
}

# The repository, with the helper built for that machine, and what to do.
make_disks() {
    mkdir "$run/repo"
    cp -a "$repo/src" "$repo/tests" "$here/init.sh" "$here/probe.py" "$run/repo/"
    find "$run/repo" -name __pycache__ -prune -exec rm -rf {} +
    rm -f "$run/repo/src/burnish/sandbox/native/_zygote"
    CC=$cc python3 -c 'import runpy, sys; sys.exit(runpy.run_path(sys.argv[1])["build_helper"]())' \
        "$run/repo/src/burnish/sandbox/native/binary.py"
    printf '%s\n' "$command" >"$run/repo/command.sh"
    printf 'KINDS="%s"\nSUITES="%s"\nSELECT="%s"\nSUITE_S=%s\n' \
        "$kinds" "$(echo $suites)" "$(echo $select)" "$suite_s" >"$run/repo/plan.sh"
    chmod -R a+rX "$run/repo"
    mke2fs -q -t ext4 -O ^has_journal -d "$run/repo" "$run/repo.ext4" 64M
    truncate -s 64M "$run/results.tar"
}

# What is written to the root disk is thrown away. In the background, so that a signal ends both.
boot() {
    nice -n 10 timeout "$longest" "${qemu[@]}" -accel tcg,thread=multi -smp "${BURNISH_VM_CPUS:-2}" \
        -m "${BURNISH_VM_MEMORY:-2G}" -nographic -no-reboot -nic none \
        -kernel "$dir/kernel-$kernel/vmlinuz" -initrd "$run/initrd" \
        -append "console=$console quiet panic=-1 rdinit=/init" \
        -drive "file=$dir/root.ext4,format=raw,if=virtio,snapshot=on" \
        -drive "file=$run/repo.ext4,format=raw,if=virtio,readonly=on" \
        -drive "file=$run/results.tar,format=raw,if=virtio" </dev/null > >(tee "$run/console") 2>&1 &
    machine=$!
    wait "$machine" || true
    machine=""
}

judge() {
    tar -C "$run" -xf "$run/results.tar" 2>/dev/null || { echo "the machine left no results" >&2 && exit 1; }
    if [ -n "${BURNISH_VM_DIR:-}" ]; then
        rm -rf "$dir/results-$kernel" && cp -a "$run/results" "$dir/results-$kernel"
        cp "$run/console" "$dir/results-$kernel/"
    fi
    local failed=0 what code kind
    while read -r what code kind; do
        echo "$kind $what: exit $code"
        [ "$code" = "$([ "$refusal$what" = 1probe ] && echo 3 || echo 0)" ] || failed=1
    done <"$run/results/codes"
    exit $failed
}

end() {
    [ -z "${machine:-}" ] || kill "$machine" 2>/dev/null || true
    rm -rf "$run"
    [ -n "${BURNISH_VM_DIR:-}" ] || rm -rf "$dir"
}

main() {
    parse "$@"
    if [ -n "${BURNISH_VM_DIR:-}" ]; then dir=$BURNISH_VM_DIR/$arch; else dir=$(mktemp -d); fi
    mkdir -p "$dir"
    run=$(mktemp -d "$dir/run.XXXXXX")
    trap end EXIT
    trap 'exit 130' INT TERM
    unpack_root
    unpack_kernel
    make_initramfs
    make_disks
    boot
    judge
}

main "$@"
