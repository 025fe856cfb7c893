# Sourced: what XLA is told on NVIDIA's devices. A flag that is in XLA_FLAGS already comes later and wins.
#
#   . scripts/gpu_flags.sh
#
# The latency-hiding scheduler is what NVIDIA's own JAX images set (docs.nvidia.com/jax-toolbox/environment-variables). CUDA graphs need no flag:
# jaxlib records fusions, matrix products and kernels in command buffers by default; --xla_gpu_enable_command_buffer=+WHILE,+CONDITIONAL
# would record loops and branches too and has not been measured here, nor has --xla_gpu_triton_gemm_any=true (docs.jax.dev, "GPU
# performance tips").
export XLA_FLAGS="--xla_gpu_enable_latency_hiding_scheduler=true ${XLA_FLAGS:-}"
