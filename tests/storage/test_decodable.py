"""Records are read by several threads at once, the first time too."""

from tests.support.jobs import run_python

CODE = """\
import sys, threading, types
import msgspec
from rankfeed.storage.commit import decodable

RECORDS = '''
from __future__ import annotations
import msgspec
@decodable
class Inner(msgspec.Struct):
    name: str
    numbers: tuple[int, ...] | None
@decodable
class Outer(msgspec.Struct):
    count: int
    inner: list[Inner]
    other: Inner
'''
TEXT = b'{"count": 1, "inner": [{"name": "a", "numbers": [1]}], "other": {"name": "b", "numbers": null}}'

sys.setswitchinterval(1e-6)
for index in range(300):
    module = types.ModuleType(f"records{index}")
    sys.modules[module.__name__] = module
    module.decodable = decodable
    exec(RECORDS, module.__dict__)
    together, read = threading.Barrier(6), []
    def go():
        together.wait()
        read.append(msgspec.json.decode(TEXT, type=module.Outer))
    threads = [threading.Thread(target=go) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [record.other.name for record in read] == ["b"] * 6
print("done")
"""


def test_threads_that_decode_a_new_record_class_at_the_same_time_succeed() -> None:
    assert run_python(CODE) == "done\n"
