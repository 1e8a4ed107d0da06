// fp8.cu -- rows in 8 bits: e4m3 numbers, and a float32 scale for each 128 columns. The bits are those of src/cpu/fp8.rs.
//
// A row is its numbers, padded to 16 bytes, then its scales, padded to 16 bytes; padding is zeros. Caller owns all memory.
// Example: columns [896, 1, -3] have the scale 896 / 448 = 2 and become [448, 0.5, -1.5].
#include "common.cuh"

constexpr float kMostFp8 = 448.0f;

__device__ inline size_t round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }
// A 64-bit division takes several times as long as a 32-bit one.
__device__ inline size_t quotient_of(size_t value, size_t by) {
  return ((value | by) >> 32) == 0 ? static_cast<uint32_t>(value) / static_cast<uint32_t>(by) : value / by;
}

// A part of a row that one thread takes: 16 bytes of it as floats.
template <typename Row>
struct Part {
  static constexpr int kColumns = 16 / sizeof(Row);
  static constexpr unsigned kLanes = kFp8Columns / kColumns;  // threads that share a scale
  float at[kColumns];
};

// Columns column..column + kColumns of a row, zeros past its end. `whole`: 16 bytes at once.
template <typename Row>
__device__ inline Part<Row> load_part(const Row* __restrict__ row, size_t column, size_t width, bool whole) {
  constexpr int kColumns = Part<Row>::kColumns;
  Part<Row> part;
  if (whole && column < width) {
    const auto here = *reinterpret_cast<const Pack<Row, kColumns>*>(row + column);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) part.at[i] = to_float(here.at[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) part.at[i] = column + i < width ? to_float(row[column + i]) : 0.0f;
  }
  return part;
}

// Launch: 1-D grid of any size, blocks of whole warps. A group of lanes takes 128 columns at a time.
template <typename Row>
__device__ void quantize(const Row* __restrict__ rows,  // [num_rows, width]      device
                         unsigned char* out,            // [num_rows, row_bytes]  device, written; a multiple of 16
                         size_t num_rows, size_t width, size_t row_bytes) {
  using Mine = Part<Row>;
  const size_t blocks = quotient_of(width + kFp8Columns - 1, kFp8Columns), units = num_rows * blocks;
  const size_t number_bytes = round_up(width, 16), scales = (row_bytes - number_bytes) / sizeof(float);
  const bool whole = multiples_of(16, rows, nullptr, nullptr, width * sizeof(Row));
  const size_t lane = threadIdx.x % Mine::kLanes, step = num_threads() / Mine::kLanes;
  // All lanes of a warp stay in the loop: they exchange their largest magnitudes.
  for (size_t first = global_thread() / kWarp * (kWarp / Mine::kLanes); first < units; first += step) {
    const size_t unit = first + threadIdx.x % kWarp / Mine::kLanes;
    const bool is_mine = unit < units;
    const size_t row = is_mine ? quotient_of(unit, blocks) : 0, block = is_mine ? unit - row * blocks : 0;
    const size_t column = is_mine ? block * kFp8Columns + lane * Mine::kColumns : width;
    const Mine part = load_part(rows + row * width, column, width, whole);
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < Mine::kColumns; ++i) {
      const uint32_t magnitude = __float_as_uint(part.at[i]) & 0x7fffffffu;
      most = magnitude > most ? magnitude : most;
    }
#pragma unroll
    for (unsigned other = Mine::kLanes / 2; other > 0; other /= 2) {
      const uint32_t theirs = __shfl_xor_sync(kAllLanes, most, other);
      most = theirs > most ? theirs : most;
    }
    if (!is_mine) continue;
    const bool finite = most < 0x7f800000u;
    const float least = __uint_as_float(0x00800000u), share = __fdiv_rn(__uint_as_float(most), kMostFp8);
    const float scale = !finite ? __uint_as_float(0x7fc00000u) : share > least ? share : least;
    const float inverse = __fdiv_rn(1.0f, scale);
    unsigned char* const out_row = out + row * row_bytes;
    if (column < number_bytes) {
      Pack<uint16_t, Mine::kColumns / 2> numbers;
#pragma unroll
      for (int i = 0; i < Mine::kColumns; i += 2) {  // zeros past the end, also where the scale is NaN
        const float low = column + i < width ? __fmul_rn(part.at[i], inverse) : 0.0f;
        const float high = column + i + 1 < width ? __fmul_rn(part.at[i + 1], inverse) : 0.0f;
        numbers.at[i / 2] = e4m3_bits(low, high);
      }
      *reinterpret_cast<decltype(numbers)*>(out_row + column) = numbers;
    }
    float* const out_scales = reinterpret_cast<float*>(out_row + number_bytes);
    if (lane == 0) out_scales[block] = scale;
    if (block == blocks - 1 && blocks + lane < scales) out_scales[blocks + lane] = 0.0f;
  }
}

// Launch: 1-D grid of any size. A thread takes 16 bytes of the output at a time.
template <typename Row>
__device__ void dequantize(const unsigned char* __restrict__ rows,  // [num_rows, row_bytes]  device; a multiple of 16
                           Row* __restrict__ out,                   // [num_rows, width]      device, written
                           size_t num_rows, size_t width, size_t row_bytes) {
  constexpr int kColumns = Part<Row>::kColumns;
  const size_t parts = (width + kColumns - 1) / kColumns, units = num_rows * parts;
  const bool whole = multiples_of(16, out, nullptr, nullptr, width * sizeof(Row));
  for (size_t unit = global_thread(); unit < units; unit += num_threads()) {
    const size_t row = quotient_of(unit, parts), column = (unit - row * parts) * kColumns;
    const unsigned char* const in_row = rows + row * row_bytes;
    const float* const scales = reinterpret_cast<const float*>(in_row + round_up(width, 16));
    const float scale = scales[column / kFp8Columns];
    const auto numbers = *reinterpret_cast<const Pack<uint16_t, kColumns / 2>*>(in_row + column);
    Pack<Row, kColumns> values;
#pragma unroll
    for (int i = 0; i < kColumns; i += 2) {
      float low, high;
      e4m3_to_floats(numbers.at[i / 2], low, high);
      values.at[i] = from_float<Row>(__fmul_rn(low, scale));
      values.at[i + 1] = from_float<Row>(__fmul_rn(high, scale));
    }
    Row* const out_row = out + row * width;
    if (whole) {
      *reinterpret_cast<decltype(values)*>(out_row + column) = values;
    } else {
      for (int i = 0; i < kColumns && column + i < width; ++i) out_row[column + i] = values.at[i];
    }
  }
}

#define EVERMOE_FP8(name, Row)                                                                                        \
  extern "C" __global__ void quantize_##name(const Row* rows, unsigned char* out, size_t num_rows, size_t width,      \
                                             size_t row_bytes) {                                                      \
    quantize(rows, out, num_rows, width, row_bytes);                                                                  \
  }                                                                                                                   \
  extern "C" __global__ void dequantize_##name(const unsigned char* rows, Row* out, size_t num_rows, size_t width,    \
                                               size_t row_bytes) {                                                    \
    dequantize(rows, out, num_rows, width, row_bytes);                                                                \
  }
EVERMOE_FP8(f32, float)
EVERMOE_FP8(bf16, Bf16)
EVERMOE_FP8(f16, Fp16)
