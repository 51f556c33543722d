"""What each extra is used for in the environment that has it: a page of the documentation, or a program."""

PAGES = {
    "accelerate": "docs/tasks/train-with-accelerate.md",
    "lance": "docs/tasks/train-from-lance.md",
    "lightning": "docs/tasks/lightning.md",
    "pyg": "docs/tasks/pyg.md",
    "report": "docs/tasks/report.md",
    "transformers": "docs/tasks/transformers.md",
    "webdataset": "docs/tasks/webdataset-pipelines.md",
}

_DATA = """
import rankfeed as rf

source = rf.from_dataset([{"x": float(i)} for i in range(100)])
loader = rf.Loader(source, batch_size=8)
"""

_TAR = """
import io, tarfile
import numpy as np
import rankfeed as rf

def write(name, *members):
    with tarfile.open("shard-000.tar", "w") as tar:
        for index, data in enumerate(members):
            member = tarfile.TarInfo(f"{index:03d}.{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return rf.open("shard-000.tar")
"""

PROGRAMS = {
    "audio": f"""{_TAR}
import soundfile

sound, file = np.linspace(-0.5, 0.5, 800, dtype=np.float32), io.BytesIO()
soundfile.write(file, sound, 8000, format="WAV", subtype="FLOAT")
for batch in rf.Loader(write("wav", file.getvalue(), file.getvalue()), batch_size=2):
    assert batch["wav"].shape[:2] == (2, 800) and batch["wav"][1].numpy().ravel().tolist() == sound.tolist()
""",
    "image": f"""{_TAR}
from PIL import Image

pixels, file = np.arange(48, dtype=np.uint8).reshape(4, 4, 3), io.BytesIO()
Image.fromarray(pixels).save(file, "PNG")
for batch in rf.Loader(write("png", file.getvalue(), file.getvalue()), batch_size=2):
    assert [image.tolist() for image in batch["png"]] == [pixels.tolist()] * 2
""",
    "mpi": """
import mpi4py
import rankfeed as rf

assert mpi4py.__version__ and rf.Topology.detect().world_size == 1
""",
    "ray": f"""{_DATA}
import ray

ray.init(num_cpus=1, include_dashboard=False)
written = rf.write(source, "written", runner="ray", progress=False)
assert [sample["x"] for sample in written] == [float(i) for i in range(100)]
""",
}
