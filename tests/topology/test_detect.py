"""Topology.detect: the variables of each launcher, as seen on real clusters, give a topology or an error."""

import contextlib
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankfeed.errors import TopologyError
from rankfeed.topology import Topology


def torchrun(rank, size, local_rank=None, local_size=None, elastic=True):
    local_size = local_size or size
    node, local = divmod(rank, local_size)
    return {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": local if local_rank is None else local_rank,
        "LOCAL_WORLD_SIZE": local_size,
        "GROUP_RANK": node,
        "GROUP_WORLD_SIZE": size // local_size,
        **({"TORCHELASTIC_RUN_ID": "none"} if elastic else {}),
    }


def slurm(rank, per_node, step="0"):
    """A step with these numbers of tasks on the nodes; ``per_node`` is Slurm's own way to write it."""
    counts = []
    for part in per_node.split(","):
        count, _, times = part.partition("(x")
        counts += [int(count)] * int(times.rstrip(")") or 1)
    places = [(node, local) for node, count in enumerate(counts) for local in range(count)]
    return {
        "SLURM_JOB_ID": 7,
        "SLURM_STEP_ID": step,
        "SLURM_PROCID": rank,
        "SLURM_LOCALID": places[rank][1],
        "SLURM_NODEID": places[rank][0],
        "SLURM_NTASKS": len(places),
        "SLURM_STEP_NUM_TASKS": len(places),
        "SLURM_STEP_NUM_NODES": len(counts),
        "SLURM_STEP_TASKS_PER_NODE": per_node,
    }


# A batch script without srun, and a shell inside salloc: one process, whatever was asked for.
BATCH = {"SLURM_JOB_ID": 7, "SLURM_PROCID": 0, "SLURM_NTASKS": 2, "SLURM_LOCALID": 0, "SLURM_NODEID": 0}
SALLOC = {"SLURM_JOB_ID": 7, "SLURM_NTASKS": 2, "SLURM_NNODES": 2, "SLURM_TASKS_PER_NODE": "1(x2)"}


def openmpi(rank, size, local_rank, local_size):
    return {
        "OMPI_COMM_WORLD_RANK": rank,
        "OMPI_COMM_WORLD_SIZE": size,
        "OMPI_COMM_WORLD_LOCAL_RANK": local_rank,
        "OMPI_COMM_WORLD_LOCAL_SIZE": local_size,
        "OMPI_COMM_WORLD_NODE_RANK": local_rank,
        "PMIX_RANK": rank,
        "PMIX_NAMESPACE": "1956773889",
    }


def pmi(rank, size):
    return {"PMI_RANK": rank, "PMI_SIZE": size}


def hydra(rank, size, local_rank, local_size):
    return {**pmi(rank, size), "MPI_LOCALRANKID": local_rank, "MPI_LOCALNRANKS": local_size}


def pmix(rank):
    return {"PMIX_RANK": rank, "PMIX_NAMESPACE": "slurm.pmix.7.0"}


def jsrun(rank, size, local_rank):
    return {"JSM_NAMESPACE_RANK": rank, "JSM_NAMESPACE_SIZE": size, "JSM_NAMESPACE_LOCAL_RANK": local_rank}


def mvapich2(rank, size, local_rank, local_size):
    names = {"RANK": rank, "SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_SIZE": local_size}
    return {f"MV2_COMM_WORLD_{name}": value for name, value in names.items()}


def lightning(local_rank, node, size, **more):
    return {"LOCAL_RANK": local_rank, "NODE_RANK": node, "WORLD_SIZE": size, "MASTER_PORT": 1234, **more}


def plain(rank, size, **more):
    return {"RANK": rank, "WORLD_SIZE": size, **more}


def detect(environ):
    return Topology.detect({name: str(value) for name, value in environ.items()})


def parse(text):
    *pairs, launcher = text.split()
    return Topology(*(int(number) for pair in pairs for number in pair.split("/")), launcher)


# case: variables -> rank/world_size local_rank/local_world_size node/num_nodes launcher
LEGITIMATE = {
    "nothing set": ({"PATH": "/bin", "HOME": "/root"}, "0/1 0/1 0/1 single"),
    "torchrun on two nodes": (torchrun(5, 8, local_size=4), "5/8 1/4 1/2 torchrun"),
    "torchrun with virtual local ranks": (torchrun(3, 4, local_rank=0), "3/4 0/4 0/1 torchrun"),
    "RANK and WORLD_SIZE alone": (plain(1, 2), "1/2 1/2 0/1 torchrun"),
    "DeepSpeed, AzureML, Ray: torchrun's names without its mark": (
        plain(5, 8, LOCAL_RANK=1, LOCAL_WORLD_SIZE=4, NODE_RANK=1),
        "5/8 1/4 1/2 torchrun",
    ),
    "a node's rank without its local world size": (plain(5, 8, LOCAL_RANK=1, NODE_RANK=1), "5/8 1/8 0/1 torchrun"),
    "WORLD_SIZE=1 alone": ({"WORLD_SIZE": 1}, "0/1 0/1 0/1 torchrun"),
    "LOCAL_RANK=0 alone, as old scripts export": ({"LOCAL_RANK": 0}, "0/1 0/1 0/1 single"),
    "NODE_RANK=0 alone, as Lightning's users export": ({"NODE_RANK": 0}, "0/1 0/1 0/1 single"),
    "srun, even nodes": (slurm(3, "2(x2)"), "3/4 1/2 1/2 slurm"),
    "srun, uneven nodes": (slurm(6, "2(x3),1"), "6/7 0/1 3/4 slurm"),
    "srun, or srun --pty bash, one process": (slurm(0, "1"), "0/1 0/1 0/1 slurm"),
    "a step without lists of nodes": (
        {
            "SLURM_STEP_ID": 0,
            "SLURM_PROCID": 3,
            "SLURM_NTASKS": 4,
            "SLURM_LOCALID": 1,
            "SLURM_NODEID": 1,
            "SLURM_NNODES": 2,
        },
        "3/4 1/2 1/2 slurm",
    ),
    "sbatch without srun": (BATCH, "0/1 0/1 0/1 single"),
    "sbatch without srun, as a step": ({**BATCH, "SLURM_STEP_ID": 4294967291}, "0/1 0/1 0/1 single"),
    "salloc's shell": (SALLOC, "0/1 0/1 0/1 single"),
    "salloc's shell on a node": ({**SALLOC, "SLURM_STEP_ID": 4294967290, "SLURM_PROCID": 0}, "0/1 0/1 0/1 single"),
    "srun --mpi=pmi2": ({**slurm(2, "2,1"), **pmi(2, 3)}, "2/3 0/1 1/2 slurm"),
    "srun --mpi=pmix": ({**slurm(2, "2,1"), **pmix(2)}, "2/3 0/1 1/2 slurm"),
    "srun, and the program spoke MPI": ({**slurm(2, "2,1"), **openmpi(2, 3, 0, 1)}, "2/3 0/1 1/2 slurm"),
    "torchrun on nodes of a step": ({**slurm(1, "1(x2)"), **torchrun(5, 8, local_size=4)}, "5/8 1/4 1/2 torchrun"),
    "torchrun, one process a node": (
        {**slurm(0, "1(x2)"), **torchrun(1, 2, local_size=1)},
        "1/2 0/1 1/2 torchrun",
    ),
    "torchrun for one process inside a larger step": ({**slurm(1, "4"), **torchrun(0, 1)}, "0/1 0/1 0/1 torchrun"),
    "torchrun in a batch script": ({**BATCH, **torchrun(1, 2)}, "1/2 1/2 0/1 torchrun"),
    "torchrun, and half of an older launcher": ({"PMI_RANK": 0, **torchrun(1, 2)}, "1/2 1/2 0/1 torchrun"),
    "srun, and the script exports RANK=$SLURM_PROCID": ({**slurm(3, "2(x2)"), **plain(3, 4)}, "3/4 1/2 1/2 slurm"),
    "WORLD_SIZE=$SLURM_NTASKS exported before srun": ({**slurm(3, "2(x2)"), "WORLD_SIZE": 4}, "3/4 1/2 1/2 slurm"),
    "srun, LOCAL_RANK=$SLURM_LOCALID exported": ({**slurm(3, "2(x2)"), "LOCAL_RANK": 1}, "3/4 1/2 1/2 slurm"),
    "srun starts a spawner of its own on each node": (
        {**slurm(1, "1(x2)"), **plain(5, 8, LOCAL_RANK=1, LOCAL_WORLD_SIZE=4, NODE_RANK=1)},
        "5/8 1/4 1/2 torchrun",
    ),
    "mpirun, and the script exports RANK from it": ({**openmpi(1, 4, 1, 2), **plain(1, 4)}, "1/4 1/2 0/2 openmpi"),
    "mpirun, node after node": (openmpi(5, 8, 1, 4), "5/8 1/4 1/2 openmpi"),
    "mpirun --map-by node": (openmpi(3, 8, 1, 4), "3/8 1/4 1/2 openmpi"),
    "mpirun, uneven nodes": (openmpi(1, 4, 1, 3), "1/4 1/3 0/1 openmpi"),
    "mpirun, one process": (openmpi(0, 1, 0, 1), "0/1 0/1 0/1 openmpi"),
    # mpirun starts its daemons as a step with one task a node; what they start inherits the step's variables.
    "mpirun in a batch script, on its own node": ({**BATCH, **openmpi(1, 8, 1, 4)}, "1/8 1/4 0/2 openmpi"),
    "mpirun in a batch script, on another node": ({**slurm(0, "1"), **openmpi(5, 8, 1, 4)}, "5/8 1/4 1/2 openmpi"),
    "mpirun from outside, on two nodes": ({**slurm(1, "1(x2)"), **openmpi(5, 8, 1, 4)}, "5/8 1/4 1/2 openmpi"),
    "MPICH inside a Slurm allocation": ({**slurm(1, "1(x2)"), **hydra(5, 8, 1, 4)}, "5/8 1/4 1/2 mpich"),
    "MPICH": (hydra(5, 8, 1, 4), "5/8 1/4 1/2 mpich"),
    "MPICH without local ranks": (pmi(1, 2), "1/2 1/2 0/1 mpich"),
    "Cray PALS": ({**pmi(5, 8), "PMI_LOCAL_RANK": 1, "PMI_LOCAL_SIZE": 4, "PALS_RANKID": 5}, "5/8 1/4 1/2 mpich"),
    "Cray's own settings": ({"PMI_NO_FORK": 1, "PMI_MMAP_SYNC_WAIT_TIME": 300}, "0/1 0/1 0/1 single"),
    "Intel MPI": ({**hydra(5, 8, 1, 4), "I_MPI_HYDRA_TOPOLIB": "ipl2"}, "5/8 1/4 1/2 intelmpi"),
    "Intel MPI's settings alone": ({"I_MPI_ROOT": "/opt/intel", "I_MPI_DEBUG": 5}, "0/1 0/1 0/1 single"),
    "MVAPICH2": (mvapich2(5, 8, 1, 4), "5/8 1/4 1/2 mvapich2"),
    "MVAPICH2 started by Hydra": ({**mvapich2(5, 8, 1, 4), **hydra(5, 8, 1, 4)}, "5/8 1/4 1/2 mpich"),
    "jsrun": (jsrun(1, 4, 1), "1/4 1/4 0/1 lsf"),
    "jsrun, local sizes too": ({**jsrun(3, 4, 1), "JSM_NAMESPACE_LOCAL_SIZE": 2}, "3/4 1/2 1/2 lsf"),
    "jsrun of Spectrum MPI": ({**jsrun(3, 4, 1), **openmpi(3, 4, 1, 2)}, "3/4 1/2 1/2 openmpi"),
    "prterun, and the script exports RANK and WORLD_SIZE": ({**pmix(1), **plain(1, 2)}, "1/2 1/2 0/1 torchrun"),
    "PMIX_NAMESPACE alone": ({"PMIX_NAMESPACE": "x"}, "0/1 0/1 0/1 single"),
    "a child of a process that initialised Open MPI by itself": (
        {"OMPI_MCA_ess": "singleton", "OMPI_APP_CTX_NUM_PROCS": "1", **pmix(0)},
        "0/1 0/1 0/1 single",
    ),
    "torchrun there": ({"OMPI_MCA_ess": "singleton", **pmix(0), **plain(1, 2)}, "1/2 1/2 0/1 torchrun"),
    "Lightning's child on the first node": (lightning(1, 0, 2), "1/2 1/2 0/1 lightning"),
    "Lightning's child on another node": (lightning(1, 1, 4, LOCAL_WORLD_SIZE=2), "3/4 1/2 1/2 lightning"),
    "Lightning's child in srun --pty bash": ({**slurm(0, "1"), **lightning(1, 0, 2)}, "1/2 1/2 0/1 lightning"),
    "Lightning's names exported to a step": ({**slurm(3, "2(x2)"), **lightning(1, 1, 4)}, "3/4 1/2 1/2 slurm"),
    "spaces around a number": ({"RANK": " 1", "WORLD_SIZE": "2 "}, "1/2 1/2 0/1 torchrun"),
}


@pytest.mark.parametrize("case", LEGITIMATE)
def test_detect_returns_the_topology_from_the_environment_variables_of_each_launcher(case):
    environ, expected = LEGITIMATE[case]
    assert detect(environ) == parse(expected)


# case: variables -> parts of the error
REFUSED = {
    "WORLD_SIZE without RANK": ({"WORLD_SIZE": 4}, "WORLD_SIZE=4; RANK"),
    "RANK without WORLD_SIZE": ({"RANK": 0}, "RANK=0; WORLD_SIZE"),
    "LOCAL_RANK and WORLD_SIZE without RANK": ({"LOCAL_RANK": 0, "WORLD_SIZE": 2}, "LOCAL_RANK=0"),
    "a local rank and no world": ({"LOCAL_RANK": 2}, "LOCAL_RANK=2"),
    "a node and no world": ({"NODE_RANK": 1}, "NODE_RANK=1"),
    "local processes and no world": ({"LOCAL_WORLD_SIZE": 4}, "LOCAL_WORLD_SIZE=4"),
    "an MPI local rank and no world": ({"MPI_LOCALRANKID": 1}, "MPI_LOCALRANKID=1"),
    "torchrun's mark and nothing else": ({"TORCHELASTIC_RUN_ID": "x"}, "TORCHELASTIC_RUN_ID=x"),
    "torchrun's child with its world taken away, in a step": (
        {**slurm(0, "1(x2)"), "TORCHELASTIC_RUN_ID": "x", "LOCAL_RANK": 1},
        "LOCAL_RANK=1; WORLD_SIZE",
    ),
    "a step without a rank": ({"SLURM_STEP_ID": 0}, "SLURM_STEP_ID=0; SLURM_PROCID"),
    "a step without a size": ({"SLURM_STEP_ID": 0, "SLURM_PROCID": 0}, "SLURM_PROCID=0; SLURM_STEP_NUM_TASKS"),
    "a list of tasks that cannot be read": (
        {**slurm(1, "2"), "SLURM_STEP_TASKS_PER_NODE": "2(y3)"},
        "SLURM_STEP_TASKS_PER_NODE='2(y3)'",
    ),
    "a list of tasks that is too short": (
        {**slurm(3, "2(x2)"), "SLURM_STEP_TASKS_PER_NODE": "2"},
        "SLURM_STEP_TASKS_PER_NODE='2'; node 1",
    ),
    "PMI_RANK without PMI_SIZE": ({"PMI_RANK": 0}, "PMI_RANK=0; PMI_SIZE"),
    "PMI_SIZE without PMI_RANK": ({"PMI_SIZE": 2}, "PMI_SIZE=2; PMI_RANK"),
    "Open MPI's rank without its size": ({"OMPI_COMM_WORLD_RANK": 0}, "OMPI_COMM_WORLD_SIZE"),
    "MVAPICH2's rank without its size": ({"MV2_COMM_WORLD_RANK": 0}, "MV2_COMM_WORLD_SIZE"),
    "jsrun's size without its rank": ({"JSM_NAMESPACE_SIZE": 2}, "JSM_NAMESPACE_RANK"),
    "half of an MPI launcher inside a step": ({**slurm(0, "2"), "PMI_RANK": 0}, "PMI_RANK=0; PMI_SIZE"),
    "PMIx without a size": (pmix(0), "PMIX_RANK=0; size"),
    "PMIX_RANK, and nothing else": ({"PMIX_RANK": 0}, "PMIX_RANK=0"),
    "PMIx, and a world's size without its rank": ({**pmix(0), "WORLD_SIZE": 2}, "WORLD_SIZE=2"),
    "PMIx and a step that disagree": ({**slurm(1, "1(x2)"), **pmix(3)}, "PMIX_RANK=3; SLURM_PROCID=1"),
    "Lightning's child on another node": (lightning(1, 1, 4), "NODE_RANK=1; LOCAL_RANK=1; LOCAL_WORLD_SIZE"),
    "Lightning's children of two tasks on one node": (
        {**slurm(1, "2"), **lightning(0, 0, 2)},
        "SLURM_PROCID=1; LOCAL_RANK=0; NODE_RANK=0",
    ),
    "RANK=0 WORLD_SIZE=1 left over, under srun": (
        {**slurm(0, "2(x2)"), **plain(0, 1)},
        "RANK=0; WORLD_SIZE=1; SLURM_PROCID=0; SLURM_STEP_NUM_TASKS=4",
    ),
    "WORLD_SIZE=1 left over, under srun": ({**slurm(0, "2(x2)"), "WORLD_SIZE": 1}, "WORLD_SIZE=1"),
    "RANK=0 WORLD_SIZE=1 left over, under mpirun": (
        {**openmpi(1, 4, 1, 4), **plain(0, 1)},
        "WORLD_SIZE=1; OMPI_COMM_WORLD_RANK=1",
    ),
    "RANK=0 WORLD_SIZE=1 left over, MPICH": ({**hydra(1, 4, 1, 4), **plain(0, 1)}, "WORLD_SIZE=1; PMI_RANK=1"),
    "RANK=0 left over, in a world of the same size": ({**slurm(1, "2"), **plain(0, 2)}, "RANK=0; SLURM_PROCID=1"),
    "RANK=0 of a larger world left over, under mpirun": (
        {**openmpi(1, 2, 1, 2), **plain(0, 8)},
        "RANK=0; WORLD_SIZE=8; OMPI_COMM_WORLD_RANK=1",
    ),
    "RANK=3 of a larger world left over, mpirun": ({**openmpi(1, 2, 1, 2), **plain(3, 8)}, "RANK=3; WORLD_SIZE=8"),
    "RANK=0 of 8 left over in a world of 3": ({**openmpi(2, 3, 2, 3), **plain(0, 8)}, "RANK=0; WORLD_SIZE=8"),
    "RANK=7 of 8 left over in a world of 3": ({**openmpi(1, 3, 1, 3), **plain(7, 8)}, "RANK=7; WORLD_SIZE=8"),
    "RANK=0 alone left over, under srun": ({**slurm(1, "2"), "RANK": 0}, "RANK=0; SLURM_PROCID=1"),
    "a smaller world inside a larger one": ({**slurm(1, "4"), **plain(1, 2)}, "WORLD_SIZE=2"),
    "WORLD_SIZE that is not the step's": ({**slurm(1, "2"), "WORLD_SIZE": 8}, "WORLD_SIZE=8"),
    "mpirun of one process left over, under srun": (
        {**slurm(2, "2(x2)"), **openmpi(0, 1, 0, 1)},
        "OMPI_COMM_WORLD_SIZE=1; SLURM_STEP_NUM_TASKS=4",
    ),
    "mpirun left over, under srun with one task a node": (
        {**slurm(2, "1(x4)"), **openmpi(0, 1, 0, 1)},
        "OMPI_COMM_WORLD_SIZE=1; SLURM_PROCID=2",
    ),
    "a larger MPI world than the step": ({**slurm(1, "2"), **hydra(5, 8, 1, 4)}, "PMI_RANK=5; SLURM_PROCID=1"),
    "the same size, another rank": ({**slurm(0, "1(x2)"), **hydra(1, 2, 0, 1)}, "PMI_RANK=1; SLURM_PROCID=0"),
    "a stray PMI world under mpirun": ({**openmpi(1, 4, 1, 4), **pmi(0, 1)}, "PMI_SIZE=1; OMPI_COMM_WORLD_SIZE=4"),
    "a stray PMI world under srun": ({**slurm(1, "2"), **pmi(0, 1)}, "PMI_SIZE=1; SLURM_PROCID=1"),
    "PMIx and Open MPI that disagree": ({**openmpi(1, 4, 1, 4), "PMIX_RANK": 0}, "PMIX_RANK=0"),
    "a rank that is not below the size": (plain(4, 4), "RANK=4; WORLD_SIZE=4; rank is not below world_size"),
    "a local rank that equals the local size": (torchrun(1, 4, local_rank=4), "LOCAL_RANK=4; LOCAL_WORLD_SIZE=4"),
    "more local processes than processes": (plain(0, 1, LOCAL_WORLD_SIZE=4), "LOCAL_WORLD_SIZE=4"),
    "no local processes": (openmpi(0, 2, 0, 0), "OMPI_COMM_WORLD_LOCAL_SIZE=0"),
    "a node that is not below the number of nodes": (
        {**torchrun(1, 4, local_size=2), "GROUP_RANK": 2},
        "GROUP_RANK=2; GROUP_WORLD_SIZE=2",
    ),
    "a world of size 0": (plain(0, 0), "WORLD_SIZE=0"),
    "a negative rank": (plain(-1, 4), "RANK='-1'"),
    "a rank that is no number": (plain("one", 4), "RANK='one'"),
    "a rank with a fraction": (plain("1.0", 4), "RANK='1.0'"),
    "an empty rank": (plain("", 4), "RANK=''"),
    "an absurd size": (plain(0, "9" * 5000), "WORLD_SIZE="),
    "a size in other digits": (pmi(0, "٤"), "PMI_SIZE="),
}


@pytest.mark.parametrize("case", REFUSED)
def test_incomplete_or_contradictory_environment_variables_raise_a_topology_error_naming_them(case):
    environ, parts = REFUSED[case]
    with pytest.raises(TopologyError) as caught:
        detect(environ)
    assert [part for part in parts.split("; ") if part not in str(caught.value)] == []
    assert "pass topology=" in str(caught.value)
    assert caught.value.found


@pytest.mark.parametrize(
    "stale", [plain(0, 1), {"WORLD_SIZE": 1}, openmpi(0, 1, 0, 1), hydra(0, 1, 0, 1), pmi(0, 1)]
)
@pytest.mark.parametrize(
    "launch",
    [
        [slurm(rank, "2(x2)") for rank in range(4)],
        [slurm(rank, "1(x4)") for rank in range(4)],
        [openmpi(rank, 4, rank, 4) for rank in range(4)],
        [mvapich2(rank, 4, rank, 4) for rank in range(4)],
        [jsrun(rank, 4, rank) for rank in range(4)],
    ],
    ids=["srun", "srun, one a node", "mpirun", "mpirun_rsh", "jsrun"],
)
def test_stale_variables_of_an_earlier_launch_that_contradict_the_current_one_raise_topology_error(stale, launch):
    for environ in launch:
        if stale.keys() & environ.keys():
            continue  # the launcher sets these itself
        with pytest.raises(TopologyError, match="contradict"):
            detect({**stale, **environ})


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_ranks_nodes_and_local_ranks_are_detected_for_slurm_steps_with_any_tasks_per_node(counts):
    per_node = ",".join(map(str, counts))
    seen = [detect(slurm(rank, per_node)) for rank in range(sum(counts))]
    assert Counter(topology.rank for topology in seen) == Counter(range(sum(counts)))
    assert Counter(topology.node for topology in seen) == Counter(dict(enumerate(counts)))
    assert Counter((t.node, t.local_rank) for t in seen) == Counter(
        (node, local) for node, count in enumerate(counts) for local in range(count)
    )
    assert all(t.local_world_size == counts[t.node] and t.num_nodes == len(counts) for t in seen)


@given(st.integers(1, 6), st.integers(1, 6))
def test_node_numbers_are_inferred_from_open_mpi_local_ranks(nodes, local_size):
    size = nodes * local_size
    seen = [detect(openmpi(rank, size, rank % local_size, local_size)) for rank in range(size)]
    assert Counter((t.node, t.local_rank) for t in seen) == Counter(
        (node, local) for node in range(nodes) for local in range(local_size)
    )


NAMES = [
    *torchrun(0, 1),
    "NODE_RANK",
    *slurm(0, "1"),
    *openmpi(0, 1, 0, 1),
    *hydra(0, 1, 0, 1),
    *jsrun(0, 1, 0),
    *mvapich2(0, 1, 0, 1),
    "I_MPI_ROOT",
]
VALUES = st.sampled_from(["0", "1", "2", "4", "-1", "", "x", "2(x2)"])


@given(st.dictionaries(st.sampled_from(NAMES), VALUES))
def test_detect_on_random_environments_returns_a_valid_topology_or_raises_topology_error(environ):
    with contextlib.suppress(TopologyError):
        topology = Topology.detect(environ)
        assert 0 <= topology.rank < topology.world_size


def test_detect_with_an_environ_argument_ignores_os_environ_and_the_process_group(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setitem(sys.modules, "torch.distributed", group(3, 4))
    assert Topology.detect({}) == Topology()


def group(rank, size, initialised=True):
    return SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: initialised,
        get_rank=lambda: rank,
        get_world_size=lambda: size,
    )


# case: variables, (rank, size) of the process group -> as above
GROUPS = {
    "nothing else": ({}, (1, 4), "1/4 1/4 0/1 torch.distributed"),
    "torchrun agrees": (torchrun(3, 4, local_size=2), (3, 4), "3/4 1/2 1/2 torchrun"),
    "Slurm agrees": (slurm(3, "2(x2)"), (3, 4), "3/4 1/2 1/2 slurm"),
    "Slurm disagrees": (slurm(1, "2"), (5, 8), "5/8 5/8 0/1 torch.distributed"),
    "local ranks agree": (
        {"LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2, "NODE_RANK": 1},
        (3, 4),
        "3/4 1/2 1/2 torch.distributed",
    ),
    "local ranks do not fit": ({"LOCAL_RANK": 5, "LOCAL_WORLD_SIZE": 8}, (3, 4), "3/4 3/4 0/1 torch.distributed"),
    "variables cannot be read": ({"RANK": "x", "WORLD_SIZE": "y"}, (3, 4), "3/4 3/4 0/1 torch.distributed"),
    "variables contradict each other": ({**slurm(0, "2"), **pmi(0, 1)}, (1, 2), "1/2 1/2 0/1 torch.distributed"),
    "Lightning's child on another node": (lightning(1, 1, 4), (3, 4), "3/4 1/4 0/1 torch.distributed"),
}


@pytest.mark.parametrize("case", GROUPS)
def test_rank_and_world_size_of_an_initialised_process_group_override_the_environment(clean, monkeypatch, case):
    environ, (rank, size), expected = GROUPS[case]
    for name, value in environ.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setitem(sys.modules, "torch.distributed", group(rank, size))
    assert Topology.detect() == parse(expected)


def test_detect_uses_the_environment_if_the_process_group_is_not_initialised(clean, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for module in (group(3, 4, initialised=False), SimpleNamespace(is_available=lambda: False), SimpleNamespace()):
        monkeypatch.setitem(sys.modules, "torch.distributed", module)
        assert Topology.detect() == Topology(1, 2, 1, 2, 0, 1, "torchrun")
