"""old module -> new module, below slipstream."""
M = {}
def put(old_pkg, new_pkg, text):
    for pair in text.split():
        old, _, new = pair.partition(":")
        M[f"{old_pkg}.{old}"] = f"{new_pkg}.{new or old}"

put("core", "common", "checks varlen autocast")
put("core", "runtime", "plan:dispatch library:custom_op signature:validation_cache guard:guarded_launch probe:numeric_probe "
    "ids:token_ids ids_triton:token_ids_kernel device:device_guard replay:call_replay record:call_recorder ahead:parallel_compile "
    "autograd gradient files")
put("core", "integrations", "auto_models")
put("kernels", "runtime", "kept:launch_cache again:launch_replay launching:backends")
put("core", "compiler", "arch aot trace faults:known_bugs machine:compiler_state kinds:kernel_key toolchain worker:compile_worker "
    "races:smem_hazards tiles:tile_limits hooks:triton_hooks matrix:support_matrix releases:triton_releases digest:triton_cache_key source_digest")
put("kernels", "kernels.primitives", "gluon:gluon_compat turns:semaphore notes:smem_scalars")
L, A = "kernels.linear", "kernels.attention"
put(L, L, "terms:inputs call:dispatch needs:tile_limits slices:workspace borders:varlen_slices slots:gsa product:gated_delta_product step:decode")
put(f"{L}.eager", f"{L}.eager", "walk:state_scan scan:gate_cumsum values:value_decay")
T, S = f"{L}.triton", f"{L}.sm90"
put(T, f"{T}.scalar_decay", "walk:chunk walk_parts:device walk_scan:state_passing launch tiles")
put(T, f"{T}.vector_decay", "channel_walk:chunk channel_walks:launch channel_launch:backend channel_decay:subchunk_decay channel_prepare:intra_fwd "
    "channel_levels:intra_bwd channel_grads:dqkg channel_tiles:tiles")
put(T, f"{T}.delta", "delta_walk:chunk delta_solve:solve_tril delta_grads:dqkg delta_grads_launch:dqkg_launch delta_launch:backend delta_plan:plan delta_tiles:tiles")
put(T, f"{T}.dplr", "dplr_gates:gate_sums dplr_grads:dqkg dplr_launch:backend dplr_prepare:wy dplr_scores:scores dplr_strong:intra_safe "
    "dplr_strong_grads:intra_safe_bwd dplr_tiles:tiles dplr_walk:chunk dplr_walks:launch dplr_whole:intra_anchored")
put(T, f"{T}.common", "delta_split:state_passing delta_split_launch:state_passing_launch heads:gqa_reduce counts:zero_counters")
put(T, T, "borders:varlen_slices slots:gsa_softmax step:decode step_launch:decode_launch steps:householder")
H = f"{L}.hopper"
put(H, f"{S}.scalar_decay", "additive_walk:chunk_fwd additive_back:chunk_bwd additive_launch:backend additive_plan:schedule")
put(H, f"{S}.vector_decay", "channel_edges:chunk_dqk channel_walk:chunk_fwd channel_prepare:intra channel_launch:backend channel_plan:schedule")
put(H, f"{S}.delta", "delta_walk:chunk_fwd delta_walk_wide:chunk_fwd_2tile delta_walk_back:chunk_dstate delta_back:bwd_fused delta_back_grads:bwd_fused_dqk "
    "delta_back_there:bwd_fused_recompute delta_back_launch:bwd_fused_launch delta_cut:bwd_schedule delta_ends:segment_transition delta_meet:state_passing "
    "delta_parts:device delta_solve:solve_tril delta_grads:dqkg delta_launch:launch launch:backend")
put(H, f"{S}.dplr", "dplr_levels:subchunk_decay dplr_level_grads:intra_safe_bwd dplr_strong:intra_safe dplr_segments:segment_policy dplr_grads:dqkg "
    "dplr_grads_launch:dqkg_launch dplr_grads_parts:dqkg_device dplr_launch:backend dplr_prepare:wy dplr_scores:scores dplr_solve:solve_tril "
    "dplr_walk:chunk_fwd dplr_walk_back:chunk_dstate")
put(H, f"{S}.common", "parts:device inverse:tril_inverse")
put(H, S, "plan")
X = "kernels.softmax"
put(X, A, "terms:inputs call:dispatch needs:tile_limits")
put(f"{X}.triton", f"{A}.triton", "device:launch_utils")
put(f"{X}.hopper", f"{A}.sm90", "units:tile_scheduler sums:bwd_preprocess backward_add:bwd_dq_accumulate forward_weights:online_softmax backward_fused:bwd_fused backward_kv:bwd_dkv backward_q:bwd_dq launch_fused:bwd_fused_launch")
put("kernels.norm", "kernels.norm", "plain:fallback call:dispatch needs:tile_limits terms:inputs")
put("kernels.conv", "kernels.conv", "plain:fallback")
put("kernels.conv.triton", "kernels.conv.triton", "walk:bwd_rolling")
put("kernels.loss", "kernels.loss", "kernels:cross_entropy_op guarded:launch")
put("kernels.matmul", "kernels.matmul", "terms:inputs")
put("kernels.scan", "kernels.gated_scan", "call:dispatch")
put("kernels.pointwise.triton", "kernels.pointwise.triton", "glu_again:glu_bwd_recompute")
put("cli", "tools", "checkup:doctor_checks filling:precompile_cache cover:variant_cover plans:backend_query reasons:explain_text rows:matrix_cache support:support_page samples:catalog")
put("ops", "ops", "_prologue:_preprocess _wide:_fp32 _per_head:_decay_tables")
# whole packages whose other modules follow
PACKAGES = {"core": "common", f"{L}.hopper": S, f"{X}.hopper": f"{A}.sm90", X: A, "kernels.scan": "kernels.gated_scan", "kernels.matmul.sm90": "kernels.matmul.sm90"}

TESTS = {}
def tput(old_pkg, new_pkg, text):
    for pair in text.split():
        old, _, new = pair.partition(":")
        TESTS[f"{old_pkg}.{old}"] = f"{new_pkg}.{new or old}"
tput("tests.runtime", "tests.compiler", "test_aot test_arch test_fault_patterns:test_known_bug_patterns test_faults:test_known_bugs test_fault_plans:test_known_bug_dispatch "
     "test_digest:test_triton_cache_key test_source_digest test_matrix:test_support_matrix test_races:test_smem_hazards test_releases:test_triton_releases "
     "test_tiles:test_tile_limits test_toolchain test_trace test_worker:test_compile_worker")
tput("tests.runtime", "tests.runtime", "test_guard:test_guarded_launch test_guarded_operators test_plan:test_dispatch test_replay:test_call_replay test_signature:test_validation_cache "
     "test_gradient")
tput("tests.runtime", "tests.common", "test_varlen")
tput("tests.kernels", "tests.runtime", "test_kept:test_launch_cache")
tput("tests", "tests.support", "operators blocks recurrences mappings")
tput("tests.runtime", "tests.support", "families:kernel_families patterns:ir_patterns planted:planted_bugs planted_barriers")
tput("tests.kernels", "tests.support", "interpreted")
tput("tests.kernels.attention", "tests.support", "calls:attention_calls")
tput("tests.kernels.linear", "tests.support", "sass")
tput("tests.kernels", "tests.gluon_emulator", "ordered:race_detector test_ordered:test_race_detector")
tput("tests.kernels.attention", "tests.gluon_emulator", "gluon_by_threads:threads")
K = "tests.kernels.linear"
tput(K, K, "test_delta_cut:test_sm90_delta_bwd_schedule test_delta_meet:test_sm90_delta_state_passing test_hopper_additive_by_threads:test_sm90_scalar_decay_emulated "
     "test_hopper_additive_compiles:test_sm90_scalar_decay_compiles test_hopper_by_threads:test_sm90_delta_emulated test_hopper_channel_by_threads:test_sm90_vector_decay_emulated "
     "test_hopper_channel_compiles:test_sm90_vector_decay_compiles test_hopper_compiles:test_sm90_delta_compiles test_hopper_delta_back_by_threads:test_sm90_delta_bwd_emulated "
     "test_hopper_dplr_by_threads:test_sm90_dplr_emulated test_hopper_dplr_compiles:test_sm90_dplr_compiles test_hopper_dplr_grads_by_threads:test_sm90_dplr_dqkg_emulated "
     "test_hopper_dplr_grads_compiles:test_sm90_dplr_dqkg_compiles test_hopper_launches_by_threads:test_sm90_delta_launches_emulated test_hopper_order:test_sm90_memory_order "
     "test_counts_interpreted:test_zero_counters_interpreted test_slices:test_workspace test_packed_spans:test_packed_slices test_product_memory:test_gated_delta_product_memory "
     "test_triton_channel_compiles:test_triton_vector_decay_compiles test_triton_channel_interpreted:test_triton_vector_decay_interpreted test_triton_channel_nan_interpreted:test_triton_vector_decay_nan_interpreted "
     "test_triton_compiles:test_triton_scalar_decay_compiles test_triton_interpreted:test_triton_scalar_decay_interpreted test_triton_step_compiles:test_triton_decode_compiles "
     "test_triton_step_interpreted:test_triton_decode_interpreted test_triton_step_pool:test_triton_decode_pool")
A_ = "tests.kernels.attention"
tput("tests.kernels.attention", A_, "test_hopper_by_threads:test_sm90_emulated test_hopper_compiles:test_sm90_compiles test_hopper_fused_by_threads:test_sm90_bwd_fused_emulated test_hopper_plan:test_sm90_dispatch test_latent_by_threads:test_latent_emulated")
tput("tests.gpu", "tests.gpu", "hopper_walks:sm90_runs test_additive_hopper:test_scalar_decay_sm90 test_attention_hopper:test_attention_sm90 test_attention_portable:test_attention_triton "
     "test_channel_hopper:test_vector_decay_sm90 test_delta_hopper:test_delta_sm90 test_delta_one_walk:test_delta_bwd_fused test_kept:test_launch_cache test_matmul_hopper:test_matmul_sm90 test_packed_spans:test_packed_slices test_replay:test_call_replay test_step:test_decode")
TEST_PACKAGES = {"tests.kernels.attention": A_, "tests.kernels.gated_scan": "tests.kernels.gated_scan", "tests.runtime": "tests.runtime"}
