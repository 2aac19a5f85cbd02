"""ClusterLogits on a GPU: each CTA selects the clusters of a row and owns some of its logits."""

from __future__ import annotations

from specbuild.plugins_cuda.launches import Kernel, Lowering, LoweringRequest, OpLaunch
from specbuild.runtime.errors import SpecbuildError

# The clusters whose keys fit into shared memory, those that a row reads, and the columns of a row
# that fit into registers.
MAX_CLUSTERS, MAX_READ, MAX_WIDTH = 4096, 64, 2048
# Neighbouring fp32 numbers near -1e9 differ by this.
UNREAD_STEP = 64.0
_THREADS = 256
_TOKENS_OF_A_THREAD = 8
_VECTOR = 8


def refused_sizes(clusters: int, read: int, width: int) -> str | None:
    """Return why the kernel does not support a head that reads ``read`` clusters, or None."""
    if clusters > MAX_CLUSTERS or read > MAX_READ or width > MAX_WIDTH or width % _VECTOR:
        return (
            f"{read} of {clusters} clusters and rows of {width} values, CUDA kernels support up to "
            f"{MAX_READ} of {MAX_CLUSTERS}, and up to {MAX_WIDTH} values in a multiple of {_VECTOR}"
        )
    return None


def lower(request: LoweringRequest) -> Lowering:
    """Return one launch; SpecbuildError for sizes that the kernel does not support."""
    rows, clusters = request.tensors["scores"].shape
    vocab, width = request.tensors["weight"].shape
    read = int(request.attributes["read"])
    refused = refused_sizes(clusters, read, width)
    if refused is not None:
        raise SpecbuildError(f"ClusterLogits: the head has {refused}; build with --backend cpu")
    constants = (
        ("CLUSTERS", clusters),
        ("READ", read),
        ("WIDTH", width),
        ("UNREAD", float(request.attributes["unread"])),
        ("UNREAD_STEP", UNREAD_STEP),
        ("THREADS", _THREADS),
        ("TOKENS_OF_A_THREAD", _TOKENS_OF_A_THREAD),
    )
    launch = OpLaunch(
        Kernel("cluster_logits", "cluster_logits", constants),
        grid=(-(-vocab // (_THREADS * _TOKENS_OF_A_THREAD)), rows, 1),
        block=_THREADS,
        shared_bytes=0,
        arguments=("scores", "x", "logit_rows", "weight", "cluster_of", "logits", vocab),
    )
    return Lowering((launch,))
