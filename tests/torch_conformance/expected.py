"""What becomes of those of the tests that do not simply pass, by their names.

A name with a number of ranks, as in "test, 3 ranks", is for that number alone.
"""

from __future__ import annotations

_SYNC = "SyncBatchNorm has no implementation for the CPU, and DDP refuses it there"
_DEVICE = "looks at device_ids, which DDP refuses on the CPU"
_UNBOUNDED = (
    "compares two trainings of a loss without bound, which three ranks' sums take apart by more "
    "than its tolerance: a bucket's place decides in which order gloo adds"
)

# They fail with torch by itself: the CPU is no GPU, or the test is at fault.
ALONE = {
    "test_DistributedDataParallel_SyncBatchNorm": _SYNC,
    "test_DistributedDataParallel_SyncBatchNorm_2D_Input": _SYNC,
    "test_DistributedDataParallel_SyncBatchNorm_Channels_Last": _SYNC,
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_Running_Value": _SYNC,
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_gradient": _SYNC,
    "test_DistributedDataParallel_SyncBatchNorm_No_Affine": _SYNC,
    "test_DistributedDataParallel_SyncBatchNorm_Single_Input_Per_Process": _SYNC,
    "test_DistributedDataParallel_SyncBatchNorm_half": _SYNC,
    "test_ddp_apply_optim_in_backward, 3 ranks": _UNBOUNDED,
    "test_ddp_apply_optim_in_backward_grad_as_bucket_view_false, 3 ranks": _UNBOUNDED,
    "test_ddp_device": _DEVICE,
    "test_ddp_hook_pickling_powerSGD": (
        "loads a pickled function by torch.load, which refuses that since torch 2.6"
    ),
    "test_ddp_inference": _SYNC,
    "test_ddp_logging_data_gpu": _DEVICE,
    "test_ddp_uneven_inputs_stop_iteration_sync_bn": _SYNC,
    "test_sync_bn_logged": _SYNC,
}

_ITS_OWN = "_apply_optimizer_in_backward registers a hook in the first forward, and DDP takes one"
_SPARSE = "Adasum of sparse gradients is not defined: NotImplementedError names two ways out"
_NOT_BY_PARAMETER = "refused by a ValueError: LBFGS steps all parameters together"

# They pass with torch by itself, and fail with adasum.
LOST = {
    "test_ddp_apply_optim_in_backward": _ITS_OWN,
    "test_ddp_apply_optim_in_backward_grad_as_bucket_view_false": _ITS_OWN,
    "test_ddp_apply_optim_in_backward_ignored_params": _ITS_OWN,
    "test_ddp_comm_hook_logging": "wants DDP to say that it has no hook",
    "test_ddp_grad_div_uneven_inputs": (
        "join(divide_by_initial_world_size=False) is not told to hooks: Average divides by the "
        "number of ranks, joined ones included"
    ),
    "test_ddp_profiling_torch_profiler": "looks for gloo's all-reduce in a profile",
    "test_adasum_in_backward_LBFGS": _NOT_BY_PARAMETER,
    "test_adasum_in_backward_Muon": (
        "refused by a ValueError: Muon is not among the optimizers known to step each parameter "
        "by itself"
    ),
    "test_complex_adasum_in_backward_LBFGS": _NOT_BY_PARAMETER,
    "test_complex_owners_LBFGS": _NOT_BY_PARAMETER,
    "test_owners_LBFGS": _NOT_BY_PARAMETER,
    "test_sparse_adasum_gradient_Adagrad": _SPARSE,
    "test_sparse_adasum_gradient_SGD": _SPARSE,
    "test_sparse_adasum_gradient_SparseAdam": _SPARSE,
}

_CALLBACK = "a callback makes a call and waits for it, in the thread that would carry it out"
_WORDS = "wants gloo's words: ours name the ranks that did not come"
_ONLY_GLOO = "torch's monitored_barrier takes gloo's own process groups only"

# They pass by gloo, and fail by adasum in its place.
NOT_BY_ADASUM = {
    "test_barrier_timeout_full_group": _WORDS,
    "test_barrier_timeout_global": _WORDS,
    "test_barrier_timeout_group": _WORDS,
    "test_ddp_hook_parity_powerSGD": _CALLBACK,
    # By gloo it passes with some versions of torch only, 2.15 among them.
    "test_ddp_hook_pickling_powerSGD": _CALLBACK,
    "test_ddp_profiling_torch_profiler": "looks for gloo's all-reduce in a profile",
    "test_ddp_uneven_inputs": f"PowerSGD is among its hooks: {_CALLBACK}",
    "test_get_backend": "wants the name gloo",
    "test_monitored_barrier_gloo": _ONLY_GLOO,
    "test_monitored_barrier_gloo_subgroup": _ONLY_GLOO,
}

# What the errors of those that are refused say: another error than the refusal is not expected.
REFUSALS = {
    _ITS_OWN: "can only be called once",
    _SPARSE: "sparse, of which Adasum is not defined",
    _NOT_BY_PARAMETER: "an optimizer",
}

_ISSUE = "torch skips it on Linux: its issue {}"
_ODD = "wants an even number of ranks"

SKIPPED = {
    "test_DistributedDataParallel": _ISSUE.format(77317),
    "test_DistributedDataParallel_non_default_stream": _ISSUE.format(76428),
    "test_compute_bucket_assignment_by_size_sparse_error_with_logger": _ISSUE.format(85012),
    "test_ddp_has_finalized": _ISSUE.format(102751),
    "test_ddp_model_diff_shape_across_ranks": _ISSUE.format(162676),
    "test_ddp_profiling_autograd_profiler": _ISSUE.format(77342),
    "test_ddp_profiling_execution_trace": _ISSUE.format(137765),
    "test_ddp_sync_bn_training_vs_eval": "torch skips it: it fails for them (pull request 113620)",
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd, 3 ranks": _ODD,
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd_grad_is_view, 3 ranks": _ODD,
}


def expected(name: str, size: int, hook: bool) -> tuple[str, str]:
    """Return the outcome that a test should have, and the reason unless it passes."""
    lists = [("failed", ALONE), ("skipped", SKIPPED), ("failed", LOST if hook else {})]
    for outcome, reasons in lists:
        for key in (f"{name}, {size} ranks", name):
            if key in reasons:
                fails_alone = hook and reasons is ALONE
                return outcome, ("without the hook as well: " * fails_alone) + reasons[key]
    return "passed", ""
