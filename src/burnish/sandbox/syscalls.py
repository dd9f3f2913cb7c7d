"""Numbers of the system calls that the filter names, per architecture.

Taken from the kernel's `asm/unistd_64.h` (x86_64) and `asm-generic/unistd.h` (aarch64).
"""

from typing import NamedTuple


class Architecture(NamedTuple):
    """What the filter needs to know of one machine type."""

    audit_arch: int
    """`AUDIT_ARCH_*` as the kernel reports it in `seccomp_data.arch`."""
    x32_bit: int | None
    """Bit that marks the x32 ABI in a call number, where the machine has that ABI."""
    column: int
    """Index into the values of `DENIED` and `SPECIAL`."""


ARCHITECTURES = {
    "x86_64": Architecture(0xC000003E, 0x40000000, 0),
    "aarch64": Architecture(0xC00000B7, None, 1),
}

FIRST_UNKNOWN = 468
"""Calls from this number on did not exist when this table was written; they get ENOSYS."""

# name: (x86_64, aarch64); None where the machine has no such call.
DENIED: dict[str, tuple[int | None, int | None]] = {
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    # keyrings are not namespaced
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # large attack surfaces
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "userfaultfd": (323, 282),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "seccomp": (317, 277),
    # mounts and namespaces
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "statmount": (457, 457),
    "listmount": (458, 458),
    "open_tree_attr": (467, 467),
    "unshare": (272, 97),
    "setns": (308, 268),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # the machine
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "create_module": (174, None),
    "get_kernel_syms": (177, None),
    "query_module": (178, None),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "syslog": (103, 116),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "iopl": (172, None),
    "ioperm": (173, None),
    "vhangup": (153, 58),
    "nfsservctl": (180, 42),
    "lookup_dcookie": (212, 18),
    "uselib": (134, None),
    "ustat": (136, None),
    "sysfs": (139, None),
    "modify_ldt": (154, None),
    "_sysctl": (156, None),
    # placement of memory on the host's nodes
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    "get_mempolicy": (239, 236),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "set_mempolicy_home_node": (450, 450),
    # file watching beyond the box
    "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263),
    # watching the host's own files, by instances that are counted for our user on the host
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "inotify_add_watch": (254, 27),
    "inotify_rm_watch": (255, 28),
    # one budget for the whole machine, which one box could take (`fs.aio-max-nr`)
    "io_setup": (206, 0),
    "io_destroy": (207, 1),
    "io_getevents": (208, 4),
    "io_pgetevents": (333, 292),
    "io_submit": (209, 2),
    "io_cancel": (210, 3),
    # memory that belongs to no process and no mount, so nothing but a memory cgroup can count it
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    # never implemented or removed
    "afs_syscall": (183, None),
    "tuxcall": (184, None),
    "security": (185, None),
    "getpmsg": (181, None),
    "putpmsg": (182, None),
    "vserver": (236, None),
}

# Calls whose arguments decide.
SPECIAL: dict[str, tuple[int, int]] = {
    "clone": (56, 220),
    "clone3": (435, 435),
    "ioctl": (16, 29),
    "socket": (41, 198),
    "socketpair": (53, 199),
    "personality": (135, 92),
    "fcntl": (72, 25),
    "setrlimit": (160, 164),
    "prlimit64": (302, 261),
    # answered without being made: they would write out the disks of the host, a box has none
    "sync": (162, 81),
    "syncfs": (306, 267),
}

# Of several processes, by number or by user. Process 1 of a native box must stay as it is: where
# the host has one user id for us, it has that of the jobs, and they could slow it down or end it.
ON_OTHERS: dict[str, tuple[int, int]] = {
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
}
