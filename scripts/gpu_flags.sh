# Sourced: what XLA is told where NVIDIA's devices are. A flag that is in XLA_FLAGS already comes later and wins.
#
#   . scripts/gpu_flags.sh
#
# latency_hiding_scheduler   as NVIDIA's own JAX images set it (docs.nvidia.com/jax-toolbox/environment-variables)
#
# CUDA graphs need no flag: jaxlib records kernels and matrix products in command buffers by default. Not measured and so not set:
# --xla_gpu_enable_command_buffer=+WHILE,+CONDITIONAL, which records loops and branches too, and --xla_gpu_triton_gemm_any=true.
if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
  export XLA_FLAGS="--xla_gpu_enable_latency_hiding_scheduler=true ${XLA_FLAGS:-}"
fi
