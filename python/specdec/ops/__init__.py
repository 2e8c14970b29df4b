"""Operators of the recurrences, of the short convolution, of attention, of the dense layers around them and
of acceptance.

Importing this package loads the operator library and registers the namespace `specdec` with torch. The raw
operators are `torch.ops.specdec.*`. Their twins in plain Python and float64 are: in `specdec.ops.reference`
those of the recurrences and of the convolution, in `specdec.ops.attention_reference` that of attention, in
`specdec.ops.dense` those of the dense layers (`linear_reference`, ...), in `specdec.acceptance` the rules and
the processing of logits. Operators that are several of these in one call (`verify_layer`, `verify_block`,
`verify_stack`, `draft_step`) have the bits of their parts, and `draft_tree` makes the choices of
`specdec.drafters.tree`.

The operators are for inference: none has a backward. An input that requires grad is an error in grad mode;
call them under `torch.no_grad()` or `torch.inference_mode()`, or pass `.detach()`.
"""

from specdec.ops._load import cpu_isa
from specdec.ops.acceptance import (
    Accepted,
    AcceptRule,
    accept_greedy,
    accept_sampled,
    draw_tokens,
    sampling_probs,
)
from specdec.ops.attention import rotate_heads, tree_attention
from specdec.ops.block import BlockOutputs, BlockWeights, verify_block
from specdec.ops.convolution import conv_commit, conv_verify
from specdec.ops.dense import (
    PackedWeight,
    gated_delta_gates,
    linear,
    pack_weight,
    rms_norm,
    rms_norm_linear,
    swiglu,
    swiglu_linear,
)
from specdec.ops.drafting import (
    DraftAdapter,
    Drafting,
    DraftPlace,
    DraftSampling,
    DraftStep,
    GrownTree,
    GrownTrees,
    TreeRequest,
    TreeRules,
    draft_step,
    draft_tree,
    likeliest,
)
from specdec.ops.layer import verify_layer
from specdec.ops.paths import check_path
from specdec.ops.recurrence import commit, prefill, verify
from specdec.ops.stack import (
    BlockEntries,
    BlockStack,
    StackOutputs,
    StackPending,
    StackPrefix,
    verify_stack,
)
from specdec.ops.types import ConvPending, ConvPrefix, Factors, Pending, Prefix

__all__ = [
    "AcceptRule",
    "Accepted",
    "BlockEntries",
    "BlockOutputs",
    "BlockStack",
    "BlockWeights",
    "ConvPending",
    "ConvPrefix",
    "DraftAdapter",
    "DraftPlace",
    "DraftSampling",
    "DraftStep",
    "Drafting",
    "Factors",
    "GrownTree",
    "GrownTrees",
    "PackedWeight",
    "Pending",
    "Prefix",
    "StackOutputs",
    "StackPending",
    "StackPrefix",
    "TreeRequest",
    "TreeRules",
    "accept_greedy",
    "accept_sampled",
    "check_path",
    "commit",
    "conv_commit",
    "conv_verify",
    "cpu_isa",
    "draft_step",
    "draft_tree",
    "draw_tokens",
    "gated_delta_gates",
    "likeliest",
    "linear",
    "pack_weight",
    "prefill",
    "rms_norm",
    "rms_norm_linear",
    "rotate_heads",
    "sampling_probs",
    "swiglu",
    "swiglu_linear",
    "tree_attention",
    "verify",
    "verify_block",
    "verify_layer",
    "verify_stack",
]
