"""Python without calls that only Linux has, as on macOS: code to run before a script in a process of its own."""

HIDE_LINUX_CALLS = """
import builtins, io, mmap, os, signal, socket

for module, names in (
    (os, "memfd_create pidfd_open posix_fadvise posix_fallocate sched_getaffinity "
     "sched_setaffinity eventfd splice copy_file_range getxattr preadv2"),
    (signal, "pidfd_send_signal"),
    (mmap, "MADV_POPULATE_READ MADV_HUGEPAGE MADV_DONTFORK"),
):
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)

def refuses_proc(function):
    def call(path, *arguments, **options):
        if isinstance(path, (str, bytes, os.PathLike)) and os.fsdecode(path).startswith("/proc"):
            raise FileNotFoundError(2, "hidden", path)
        return function(path, *arguments, **options)
    return call

builtins.open = io.open = refuses_proc(io.open)
os.open, os.listdir, os.readlink = map(refuses_proc, (os.open, os.listdir, os.readlink))
"""
