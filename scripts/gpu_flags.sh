# Source this file: it sets XLA_FLAGS on machines with NVIDIA GPUs. Flags that are already in XLA_FLAGS take precedence.
#
#   . scripts/gpu_flags.sh
#
# The latency hiding scheduler overlaps transfers between devices with computation. NVIDIA's JAX images set the same flag
# (docs.nvidia.com/jax-toolbox/environment-variables).
#
# CUDA graphs need no flag: jaxlib records kernels and matrix products in command buffers by default.
# --xla_gpu_enable_command_buffer=+WHILE,+CONDITIONAL, which also records loops and branches, is not set: on an H200, a
# training step took the same time with it (216 and 214 ms).
if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
  export XLA_FLAGS="--xla_gpu_enable_latency_hiding_scheduler=true ${XLA_FLAGS:-}"
fi
