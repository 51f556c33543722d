"""The zoo's table: each pipeline, how it is run, and the diagnosis that it must get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

#: Findings that a case of ours expects are all its errors and warnings; notes are free.
SOUND: tuple[str, ...] = ()

TWICE = "duplicated-by-workers"
UNSHARDED = "not-sharded-by-rank"
RESHARDED = "sharded-twice"
UNEVEN = "uneven-steps"
MISSING = "missing-samples"
PADDED = "padded-with-repeats"
DRAWN = "drawn-with-replacement"
DIFFERS = "differs-between-ranks"
SAME_ORDER = "same-order-every-epoch"
SAME_CHANCE = "same-randomness-in-workers"

#: What a library does to its own forked workers by chance.
CRASH = ("process-died",)

#: Without the run on simulated nodes.
ONE_NODE = {"other_ranks": 1}

#: What peers that cannot live with the others are installed as, each in an environment of its own.
ENVIRONMENTS = {"litdata": "litdata==0.2.76", "grain": "grain==0.2.18", "energon": "megatron-energon==7.4.1"}


#: Codes that never change the verdict, and those that leave it open.
WARNINGS = {SAME_ORDER, "memory-grows", "memory-copied", "slow-first-batch", "starved", "too-many-workers"}
UNPROVEN = {DRAWN, "never-ends", "no-ids", "not-counted"}

#: What is imported once for all pipelines of a library, and not in each rank again.
MODULES = {
    "torch": ["tests.zoo.of_torch"],
    "torchdata": ["torchdata.stateful_dataloader", "torchdata.nodes"],
    "lance": ["lance.torch.data", "lance.sampler"],
    "webdataset": ["webdataset", "wids", "rankfeed.integrations.webdataset"],
    "huggingface": ["datasets.distributed", "torchdata.stateful_dataloader"],
    "accelerate": ["accelerate", "tests.zoo.of_torch"],
    "lightning": ["lightning.pytorch", "tests.zoo.of_torch"],
    "pyg": ["torch_geometric.data", "torch_geometric.loader"],
    "mosaicml": ["tests.sources.mds.streaming_mds"],
    "rankfeed": ["rankfeed.loading", "rankfeed.sources", "pyarrow.dataset"],
    "bad": ["tests.zoo.of_torch"],
}


@dataclass(frozen=True)
class Case:
    """A pipeline, and what must be said of it.

    Attributes:
        factory: ``file:function`` in this folder.
        expects: codes of all errors and warnings, and of what is unproven.
        workers: how many each rank has.
        method: how they start.
        ranks: how many.
        may: codes of findings that come now and then.
        notes: codes of notes that must be there.
        options: for the doctor.
        environ: variables that are set.
        quick: whether it is one of those that every run of the tests covers.
    """

    factory: str
    expects: tuple[str, ...] = SOUND
    workers: int = 2
    method: str = "fork"
    ranks: int = 2
    may: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    options: dict[str, float] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)
    quick: bool = False

    @property
    def asked(self) -> dict[str, float]:
        """Options of the examination; patient, since a busy machine is no finding."""
        return {"epochs": 2, "timeout": 240, "max_seconds": 240} | self.options

    @property
    def verdict(self) -> str:
        """What the doctor must conclude."""
        codes = {*self.expects} - WARNINGS
        return "diseased" if codes - UNPROVEN else "not proven" if codes else "sound"

    def fits(self, codes: Sequence[str]) -> bool:
        """Whether these are the errors and warnings that must be found."""
        # How many CPUs there are, and how busy they are, is not the pipeline's doing.
        free = {*self.may, "too-many-workers", "slow-first-batch"} - {*self.expects}
        remaining = {*codes} - free
        crashed = "process-died" in {*codes} & {*self.may}  # before all was seen
        return remaining == {*self.expects} or (crashed and remaining <= {*self.expects})

    @property
    def name(self) -> str:
        start = f" {self.method}" if self.workers else ""
        return f"{self.factory} {self.ranks}x{self.workers}{start}"

    @property
    def target(self) -> str:
        """As the doctor takes it."""
        return f"tests.zoo.{self.factory}"

    @property
    def library(self) -> str:
        return self.factory.partition(":")[0].removeprefix("of_")

    @property
    def environment(self) -> str:
        """The environment that it needs; none: the project's own."""
        return self.library if self.library in ENVIRONMENTS else ""

    @property
    def story(self) -> str:
        """What it is, and why it is ill."""
        module, _, name = self.target.partition(":")
        factory: Any = getattr(import_module(module), name)
        return " ".join((factory.__doc__ or "").split())


CASES = [
    # torch's own loader
    Case("of_torch:distributed_sampler"),
    Case("of_torch:distributed_sampler", method="spawn"),
    Case("of_torch:distributed_sampler", workers=0),
    Case("of_torch:stream_shared_out"),
    Case("of_torch:stream_shared_out", method="forkserver"),
    Case("of_torch:augmented"),
    Case("of_torch:no_sampler", (UNSHARDED,)),
    Case("of_torch:own_seed_on_each_rank", (UNSHARDED,), workers=0),
    Case("of_torch:stream_for_each_worker", (TWICE,), quick=True),
    Case("of_torch:stream_for_each_worker", SOUND, workers=0),
    Case("of_torch:stream_for_each_worker", (TWICE,), method="spawn"),
    Case("of_torch:stream_for_each_rank", (UNSHARDED,)),
    Case("of_torch:stream_for_everybody", (TWICE, UNSHARDED)),
    Case("of_torch:other_split_on_each_rank", (DIFFERS, UNSHARDED)),
    Case("of_torch:padded_by_the_sampler", notes=(PADDED,)),
    Case("of_torch:padded_by_the_sampler", notes=(PADDED,), ranks=3, workers=0),
    Case("of_torch:cut_by_the_sampler", notes=(MISSING,)),
    Case("of_torch:uneven_list", (UNEVEN,)),
    Case("of_torch:islice_on_each_rank", (TWICE,)),
    Case("of_torch:islice_on_each_rank", SOUND, workers=0),
    Case("of_torch:batches_by_length", (UNEVEN,)),
    Case("of_torch:forgotten_set_epoch", (SAME_ORDER,), workers=0),
    Case("of_torch:set_epoch_without_effect", (SAME_ORDER,)),
    Case("of_torch:seeds_without_the_worker", (SAME_CHANCE,)),
    Case("of_torch:generator_in_the_constructor", (SAME_CHANCE,)),
    Case("of_torch:keeps_every_sample", ("memory-grows",), options={"epochs": 3}),
    Case("of_torch:everything_in_each_worker", ("memory-copied",)),
    Case("of_torch:array_in_the_constructor", SOUND),
    Case("of_torch:array_in_the_constructor", ("memory-copied",), method="spawn"),
    Case("of_torch:list_in_the_constructor", ("memory-copied",)),
    Case("of_torch:file_open_before_fork", ("handles-before-fork",)),
    Case("of_torch:plans_for_long", ("slow-first-batch",)),
    Case("of_torch:slow_samples", ("starved",), workers=0, options={"step_seconds": 0.05}),
    Case("of_torch:distributed_sampler", ("too-many-workers",), workers=3, environ={"SLURM_CPUS_PER_TASK": "2"}),
    # torchdata
    Case("of_torchdata:stateful_sampler"),
    Case("of_torchdata:stateful_stream"),
    Case("of_torchdata:state_behind", ("resume-repeats",)),
    Case("of_torchdata:state_ahead", ("resume-skips",), workers=0),
    Case("of_torchdata:state_of_the_sampler", ("resume-skips",)),
    Case("of_torchdata:nodes"),
    Case("of_torchdata:nodes_not_shared_out", (UNSHARDED,)),
    # Lance
    Case("of_lance:automatic", (UNEVEN,), workers=0),  # on 3 ranks
    # Forked workers of Lance now and then end in a segmentation fault (it warns of forking): in no quick run.
    Case("of_lance:automatic", (UNEVEN,), may=CRASH),
    Case("of_lance:automatic", (UNSHARDED, UNEVEN), method="spawn"),  # uneven on 3 ranks without workers
    Case("of_lance:automatic_that_fits", may=CRASH),
    Case("of_lance:fragments", (UNEVEN,), workers=0),  # 4 fragments on 3 ranks
    Case("of_lance:fragments", (TWICE, UNEVEN), may=CRASH),
    Case("of_lance:fragments", (TWICE, UNEVEN), method="spawn"),
    Case("of_lance:uneven_fragments", (UNEVEN,), workers=0),
    Case("of_lance:fragments_at_random", (UNEVEN, SAME_ORDER), workers=0),
    Case("of_lance:batches", SOUND, workers=0),
    Case("of_lance:batches", (TWICE,), may=CRASH),
    Case("of_lance:batches", (TWICE,), method="spawn"),
    Case("of_lance:full_scan", (UNSHARDED,), workers=0),
    Case("of_lance:full_scan", (TWICE, UNSHARDED), method="spawn"),
    Case("of_lance:with_our_sampler", may=CRASH),
    Case("of_lance:with_our_sampler", method="spawn"),
    # WebDataset
    Case("of_webdataset:split_by_node"),
    Case("of_webdataset:split_by_node", workers=0),
    Case("of_webdataset:no_nodesplitter", ("factory-raises",)),
    Case("of_webdataset:nodesplitter_off", (UNSHARDED,), workers=0),
    Case("of_webdataset:workersplitter_off", (TWICE,)),
    Case("of_webdataset:five_shards", (UNEVEN,), workers=0, quick=True),
    Case("of_webdataset:three_shards", ("factory-raises",)),
    Case(
        "of_webdataset:five_shards_with_epoch", ("repeated-samples",), may=(MISSING, SAME_ORDER, UNSHARDED, PADDED)
    ),
    Case("of_webdataset:resampled", (DRAWN,)),
    Case("of_webdataset:wids_distributed"),
    Case("of_webdataset:wids_chunked", (UNSHARDED,)),
    Case("of_webdataset:ours"),
    # Hugging Face
    Case("of_huggingface:map_style"),
    Case("of_huggingface:split_by_node"),
    Case("of_huggingface:split_with_shuffle"),
    Case("of_huggingface:shuffled_by_each_rank", (UNSHARDED,)),
    Case("of_huggingface:five_files"),
    Case("of_huggingface:not_split", (UNSHARDED,)),
    Case("of_huggingface:more_workers_than_files"),
    Case("of_huggingface:interleaved", (UNEVEN,), notes=(MISSING,)),  # uneven on 3 ranks
    Case("of_huggingface:shuffled_and_resumed", ("resume-skips",), workers=0, may=("resume-repeats",)),
    Case("of_huggingface:shuffled_and_resumed", ("factory-raises",)),
    # Accelerate
    Case("of_accelerate:shuffled"),
    Case("of_accelerate:dispatched"),
    Case("of_accelerate:split_batches", options={"other_ranks": 2}),  # batches of 10 cannot be cut over 3 ranks
    Case("of_accelerate:sampler_that_shards", (RESHARDED,)),
    Case("of_accelerate:stream_that_shards", (RESHARDED, MISSING)),  # on 3 ranks padding hides the second sharding
    # On 3 ranks rank 2 is padded with the first batch, which looks as if the loader shuffled.
    Case("of_accelerate:stream_that_shards_not_dispatched", (RESHARDED, SAME_ORDER)),
    Case("of_accelerate:even_batches", notes=(PADDED,)),
    Case("of_accelerate:uneven_batches", (UNEVEN,)),
    # Lightning
    Case("of_lightning:shuffled"),
    Case("of_lightning:sampler_that_shards", (RESHARDED,)),
    Case("of_lightning:data_that_shard", (RESHARDED,)),
    Case("of_lightning:sampler_left_alone", (SAME_ORDER,)),
    Case("of_lightning:stream_left_alone", (UNSHARDED,)),
    # PyTorch Geometric
    Case("of_pyg:graph_loader"),
    Case("of_pyg:graphs_not_shared_out", (UNSHARDED,)),
    Case("of_pyg:node_share"),
    Case("of_pyg:uneven_node_share", (UNEVEN,)),
    # MosaicML names its shared memory once per machine: nodes that are simulated on one machine collide.
    Case("of_mosaicml:shuffled", options=ONE_NODE),
    Case("of_mosaicml:remainder", notes=(PADDED,), options=ONE_NODE),
    Case("of_mosaicml:part_of_an_epoch", options=ONE_NODE),
    Case("of_mosaicml:other_batch_size", options=ONE_NODE),
    # LitData, Grain and Energon: each in an environment of its own
    Case("of_litdata:streaming"),
    Case("of_litdata:sampled_again"),
    Case("of_litdata:drops_the_rest", notes=(MISSING,)),
    Case("of_grain:shared_out", (SAME_ORDER,)),
    Case("of_grain:not_shared_out", (UNSHARDED, SAME_ORDER)),
    Case("of_grain:one_too_many", (SAME_ORDER,), workers=0, notes=(MISSING,)),
    Case("of_grain:remainder_dropped", (SAME_ORDER,), workers=0, notes=(MISSING,)),
    Case("of_energon:one_epoch"),
    Case("of_energon:for_ever", ("never-ends",), workers=0, options={"max_steps": 100}),
    Case("of_energon:every_rank_the_first", (UNSHARDED,)),
    # rankfeed
    Case("of_rankfeed:threads"),
    Case("of_rankfeed:processes"),
    Case("of_rankfeed:processes", workers=0),
    Case("of_rankfeed:from_tars"),
    Case("of_rankfeed:sampler", method="spawn"),
    Case("of_rankfeed:batch_sampler"),
    Case("of_rankfeed:split"),
    Case("of_rankfeed:in_accelerate"),
    # Factories that no doctor should have to see
    Case("bad:raises", ("factory-raises",), workers=0),
    Case("bad:raises_on_one_rank", ("factory-raises",), workers=0),
    Case("bad:raises_in_an_epoch", ("factory-raises",), workers=0),
    Case("bad:raises_in_a_worker", ("factory-raises",)),
    Case("bad:nothing", ("yields-nothing",), workers=0),
    Case("bad:nothing_on_one_rank", ("yields-nothing",), workers=0, may=("sharded-twice", UNEVEN)),
    Case("bad:none", ("factory-raises",), workers=0),
    Case("bad:endless", ("never-ends",), workers=0, options={"max_steps": 200}),
    Case("bad:hangs_when_built", ("hangs",), workers=0, options={"timeout": 15}),
    Case("bad:waits_for_the_others", ("hangs",), workers=0, options={"timeout": 15}),
    Case("bad:hangs_in_an_epoch", ("hangs",), workers=0, options={"timeout": 15}),
    Case("bad:hangs_in_a_worker", ("hangs",), options={"timeout": 15}),
    Case("bad:killed", ("process-died",), workers=0, quick=True),
    Case("bad:crashes_in_an_epoch", ("process-died",), workers=0),
    Case("bad:leaves", ("process-died",), workers=0),
    Case("bad:exits", ("factory-raises",), workers=0),
    Case("bad:worker_killed", ("process-died",)),
    Case("bad:chatty", SOUND, workers=0),
    Case("bad:no_ids", ("not-counted",), workers=0),
    Case("bad:no_such_key", ("no-ids",), workers=0),
    Case("bad:other_batches_on_each_rank", ("not-counted",), workers=0),  # no key that both ranks have
    Case("bad:other_key_on_each_rank", ("not-sharded-by-rank",), workers=0, may=("not-counted",)),
    Case("bad:unpicklable", ("factory-raises",), method="spawn"),
    Case("bad:one_epoch_only", ("yields-nothing",), workers=0),
    Case("bad:wants_more", ("factory-raises",), workers=0),
]

QUICK = [case for case in CASES if case.quick]
