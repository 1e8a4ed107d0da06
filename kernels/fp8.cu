// fp8.cu -- rows in 8 bits: e4m3 numbers, and a float32 scale per 128 columns. The bits are those of src/cpu/fp8.rs.
//
// A row is its numbers, padded to 16 bytes, then its scales, padded to 16 bytes; padding is zeros. Caller owns all memory.
// Example: columns [896, 1, -3] have the scale 896 / 448 = 2 and become [448, 0.5, -1.5].
#include "common.cuh"

constexpr float kMostFp8 = 448.0f;

__device__ inline size_t round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// The part of a row that one thread takes: 16 bytes.
template <typename Row>
struct Part {
  static constexpr int kColumns = 16 / sizeof(Row);
  static constexpr unsigned kLanes = kFp8Columns / kColumns;  // threads that share a scale
};

// kWhole: rows and their size are multiples of 16 bytes, so that a part has all of its columns or none.
template <bool kWhole, typename Row>
__device__ void quantize_by(const Row* __restrict__ rows, unsigned char* out, size_t num_rows, size_t width, size_t row_bytes) {
  constexpr int kColumns = Part<Row>::kColumns, kLanes = Part<Row>::kLanes;
  const size_t blocks = quotient_of(width + kFp8Columns - 1, kFp8Columns), units = num_rows * blocks;
  const size_t number_bytes = round_up(width, 16), scales = (row_bytes - number_bytes) / sizeof(float);
  const unsigned lane = threadIdx.x % kLanes;
  const size_t step = num_threads() / kLanes, step_rows = quotient_of(step, blocks), step_blocks = step - step_rows * blocks;
  const size_t mine = global_thread() / kLanes;
  size_t next_row = quotient_of(mine, blocks), next_block = mine - next_row * blocks;
  // All lanes of a warp stay in the loop: they exchange their largest magnitudes.
  for (size_t first = global_thread() / kWarp * (kWarp / kLanes); first < units; first += step * kFp8AtOnce) {
    Loaded<Row, kColumns> parts[kFp8AtOnce];
    size_t part_rows[kFp8AtOnce], part_blocks[kFp8AtOnce];
#pragma unroll
    for (int p = 0; p < kFp8AtOnce; ++p) {
      const size_t row = part_rows[p] = next_row, block = part_blocks[p] = next_block;
      const size_t column = block * kFp8Columns + lane * kColumns;
      if (kWhole) { // without conditions, so that no load waits for another: missing parts are read at the start of a row
        const Row* const at = rows + (row < num_rows ? row : num_rows - 1) * width + (column < width ? column : 0);
        parts[p] = *reinterpret_cast<const Loaded<Row, kColumns>*>(at);
      } else {
        parts[p] = {};
#pragma unroll
        for (int i = 0; i < kColumns; ++i)
          if (row < num_rows && column + i < width) reinterpret_cast<Row*>(&parts[p])[i] = rows[row * width + column + i];
      }
      next_row += step_rows;
      next_block += step_blocks;
      if (next_block >= blocks) {
        next_block -= blocks;
        ++next_row;
      }
    }
#pragma unroll
    for (int p = 0; p < kFp8AtOnce; ++p) {
      const size_t row = part_rows[p], block = part_blocks[p], column = block * kFp8Columns + lane * kColumns;
      if (column >= width) parts[p] = {};
      uint32_t most = 0;
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        const uint32_t magnitude = __float_as_uint(parts[p].at(i)) & 0x7fffffffu;
        most = magnitude > most ? magnitude : most;
      }
#pragma unroll
      for (unsigned other = kLanes / 2; other > 0; other /= 2) {
        const uint32_t theirs = __shfl_xor_sync(kAllLanes, most, other);
        most = theirs > most ? theirs : most;
      }
      if (row >= num_rows) continue;
      const bool finite = most < 0x7f800000u;
      const float least = __uint_as_float(0x00800000u), share = __fdiv_rn(__uint_as_float(most), kMostFp8);
      const float scale = !finite ? __uint_as_float(0x7fc00000u) : share > least ? share : least;
      const float inverse = __fdiv_rn(1.0f, scale);
      unsigned char* const out_row = out + row * row_bytes;
      if (column < number_bytes) {
        Pack<uint16_t, kColumns / 2> numbers;
#pragma unroll
        for (int i = 0; i < kColumns; i += 2) { // zeros past the end, even if the scale is NaN
          const float low = kWhole || column + i < width ? __fmul_rn(parts[p].at(i), inverse) : 0.0f;
          const float high = kWhole || column + i + 1 < width ? __fmul_rn(parts[p].at(i + 1), inverse) : 0.0f;
          numbers.at[i / 2] = !kWhole || column < width ? e4m3_bits(low, high) : uint16_t{0};
        }
        *reinterpret_cast<decltype(numbers)*>(out_row + column) = numbers;
      }
      float* const out_scales = reinterpret_cast<float*>(out_row + number_bytes);
      if (lane == 0) out_scales[block] = scale;
      if (block == blocks - 1 && blocks + lane < scales) out_scales[blocks + lane] = 0.0f;
    }
  }
}
// Launch: 1-D grid of any size, blocks of full warps. A group of lanes takes 128 columns at a time and has kFp8AtOnce
// such parts in flight, so the GPU is filled by that factor fewer threads than there are parts.
template <typename Row>
__device__ void quantize(const Row* __restrict__ rows,  // [num_rows, width]      device
                         unsigned char* out,            // [num_rows, row_bytes]  device, written; a multiple of 16
                         size_t num_rows, size_t width, size_t row_bytes) {
  if (multiples_of(16, rows, nullptr, nullptr, width * sizeof(Row))) quantize_by<true>(rows, out, num_rows, width, row_bytes);
  else quantize_by<false>(rows, out, num_rows, width, row_bytes);
}

// Launch: 1-D grid of any size. A thread takes 16 bytes of the output at a time.
template <typename Row>
__device__ void dequantize(const unsigned char* __restrict__ rows,  // [num_rows, row_bytes]  device; a multiple of 16
                           Row* __restrict__ out,                   // [num_rows, width]      device, written
                           size_t num_rows, size_t width, size_t row_bytes) {
  constexpr int kColumns = Part<Row>::kColumns;
  const size_t parts = (width + kColumns - 1) / kColumns, units = num_rows * parts;
  const bool is_wide = multiples_of(16, out, nullptr, nullptr, width * sizeof(Row));
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
    if (is_wide) {
      *reinterpret_cast<decltype(values)*>(out_row + column) = values;
    } else {
      for (int i = 0; i < kColumns && column + i < width; ++i) out_row[column + i] = values.at[i];
    }
  }
}

#define EVERMOE_FP8(name, Row)                                                                                        \
  extern "C" __global__ __launch_bounds__(256) void quantize_##name(const Row* rows, unsigned char* out,              \
                                                                    size_t num_rows, size_t width, size_t row_bytes) { \
    quantize(rows, out, num_rows, width, row_bytes);                                                                  \
  }                                                                                                                   \
  extern "C" __global__ void dequantize_##name(const unsigned char* rows, Row* out, size_t num_rows, size_t width,    \
                                               size_t row_bytes) {                                                    \
    dequantize(rows, out, num_rows, width, row_bytes);                                                                \
  }
EVERMOE_FP8(f32, float)
EVERMOE_FP8(bf16, Bf16)
EVERMOE_FP8(f16, Fp16)
