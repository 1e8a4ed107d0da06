// replay.cu -- the optimizer's steps, those of a trainer as well as those that a replica repeats from its log.
//
// The recipe is that of src/cpu/adamw.rs, bit for bit: each operation is one correctly rounded intrinsic, which nvcc
// neither fuses nor approximates (a build with -use_fast_math would flush subnormals: there is none).
// Several steps take one pass over the memory. Caller owns all of it.
#include "common.cuh"

constexpr int kMaxSteps = 8;  // in step with MAX_STEPS of src/cuda/adamw.rs
enum GradientKind : uint32_t { kZero, kFloat32, kBfloat16 };

// The numbers of one step, computed by the trainer, and its gradient. In step with `Entry` of src/cuda/adamw.rs.
struct AdamWStep {
  float loss_scale, factor, decay, lerp, square, keep, rate, spread, eps;
  GradientKind kind;
  const void* gradient;  // [num_elements] float or Bf16  device; unused where all are zero
};
struct AdamWSteps { AdamWStep at[kMaxSteps]; };
static_assert(sizeof(AdamWSteps) == kMaxSteps * 48, "words of 8 bytes without gaps between the steps");

__device__ inline void adamw_step(const AdamWStep& step, float g, float& p, float& m, float& v) {
  if (step.loss_scale != 1.0f || step.factor != 1.0f) g = __fmul_rn(__fdiv_rn(g, step.loss_scale), step.factor);
  const bool near = step.lerp < 0.5f;  // the end to start from: m, or g
  const float slope = near ? step.lerp : -__fsub_rn(1.0f, step.lerp);
  m = __fmaf_rn(slope, __fsub_rn(g, m), near ? m : g);
  v = __fmaf_rn(__fmul_rn(step.square, g), g, __fmul_rn(v, step.keep));
  const float denominator = __fadd_rn(__fdiv_rn(__fsqrt_rn(v), step.spread), step.eps);
  p = __fsub_rn(__fmul_rn(p, step.decay), __fdiv_rn(__fmul_rn(step.rate, m), denominator));
}

template <typename Row, int kCount>
__device__ inline void load_gradient(const void* gradient, size_t first, float* g) {
  const auto here = *reinterpret_cast<const Pack<Row, kCount>*>(static_cast<const Row*>(gradient) + first);
  for (int i = 0; i < kCount; ++i) g[i] = to_float(here.at[i]);
}

// All steps of the elements first..first + kCount.
template <int kCount>
__device__ inline void adamw_elements(float* p, float* m, float* v, const AdamWSteps& steps, size_t num_steps, size_t first) {
  using Floats = Pack<float, kCount>;
  Floats p_here = *reinterpret_cast<const Floats*>(p + first);
  Floats m_here = *reinterpret_cast<const Floats*>(m + first);
  Floats v_here = *reinterpret_cast<const Floats*>(v + first);
  for (size_t s = 0; s < num_steps; ++s) {
    const AdamWStep& step = steps.at[s];
    float g[kCount] = {};
    if (step.kind == kFloat32) load_gradient<float, kCount>(step.gradient, first, g);
    if (step.kind == kBfloat16) load_gradient<Bf16, kCount>(step.gradient, first, g);
    for (int i = 0; i < kCount; ++i) adamw_step(step, g[i], p_here.at[i], m_here.at[i], v_here.at[i]);
  }
  *reinterpret_cast<Floats*>(p + first) = p_here;
  *reinterpret_cast<Floats*>(m + first) = m_here;
  *reinterpret_cast<Floats*>(v + first) = v_here;
}

// Launch: 1-D grid of any size.
template <int kCount>
__device__ void adamw(float* __restrict__ p,  // [num_elements]  device, in place; aligned to kCount elements
                      float* __restrict__ m,  // [num_elements]  device, in place; as p
                      float* __restrict__ v,  // [num_elements]  device, in place; as p
                      const AdamWSteps& steps, size_t num_elements, size_t num_steps) {
  const size_t num_packs = num_elements / kCount;
  for (size_t i = global_thread(); i < num_packs; i += num_threads())
    adamw_elements<kCount>(p, m, v, steps, num_steps, i * kCount);
  for (size_t i = num_packs * kCount + global_thread(); i < num_elements; i += num_threads())
    adamw_elements<1>(p, m, v, steps, num_steps, i);
}
extern "C" __global__ void adamw_4(float* p, float* m, float* v, size_t num_elements, size_t num_steps,
                                   const __grid_constant__ AdamWSteps steps) {
  adamw<4>(p, m, v, steps, num_elements, num_steps);
}
extern "C" __global__ void adamw_1(float* p, float* m, float* v, size_t num_elements, size_t num_steps,
                                   const __grid_constant__ AdamWSteps steps) {
  adamw<1>(p, m, v, steps, num_elements, num_steps);
}
