// Weight codes to floats: decode, one product in float32, one rounding.
#pragma once

#include "intrinsics.cuh"

namespace quantkit::cuda {

// Codes that become 16 bytes.
template <class T>
constexpr int kVectorCodes = 16 / sizeof(T);

// 4 codes times the scale, to 4 elements at `out`.
template <class Format, class T>
QK_DEVICE void dequantize_quad(uint32_t codes, float scale, uint32_t* out) {
  const Word2 pairs = Decode<Format>::quad(codes);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    // The factor first: it is a power of two, and loses nothing here.
    const float low = low_half<Half>(pairs.word[i]) * Decode<Format>::kFactor * scale;
    const float high = high_half<Half>(pairs.word[i]) * Decode<Format>::kFactor * scale;
    if constexpr (sizeof(T) == 4) {
      out[2 * i] = as_bits(low);
      out[2 * i + 1] = as_bits(high);
    } else {
      out[i] = pack2<T>(low, high);
    }
  }
}

// One row a block; loads and stores are of adjacent vectors, so that each fills whole lines.
// columns and, if kGrouped, group_size are multiples of kVectorCodes<T>; codes are aligned to as
// many bytes, out to 16.
template <class Format, class T, bool kGrouped>
__global__ void __launch_bounds__(256)
    dequantize_rows(const uint8_t* codes, const float* scale, T* out, int64_t columns,
                    int64_t groups, int64_t group_size) {
  constexpr int kCodes = kVectorCodes<T>;
  constexpr int kLoads = 4;  // in flight
  const int64_t row = blockIdx.x;
  codes += row * columns;
  scale += row * groups;
  out += row * columns;
  const int vectors = static_cast<int>(columns / kCodes);
  const unsigned group_vectors = static_cast<unsigned>(kGrouped ? group_size / kCodes : 1);
  const float row_scale = scale[0];
  for (int first = threadIdx.x; first < vectors; first += kLoads * blockDim.x) {
    Word2 in[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int vector = first + i * blockDim.x;
      if (vector >= vectors) continue;
      if constexpr (kCodes == 8) {
        in[i] = load_once8(codes + vector * kCodes);
      } else {
        in[i].word[0] = load_once4(codes + vector * kCodes);
      }
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int vector = first + i * blockDim.x;
      if (vector >= vectors) continue;
      const float here =
          kGrouped ? scale[static_cast<unsigned>(vector) / group_vectors] : row_scale;
      Word4 result;
      dequantize_quad<Format, T>(in[i].word[0], here, result.word);
      if constexpr (kCodes == 8) {
        dequantize_quad<Format, T>(in[i].word[1], here, result.word + 2);
      }
      reinterpret_cast<Word4*>(out)[vector] = result;
    }
  }
}

// Any shape and alignment.
template <class Format, class T>
__global__ void __launch_bounds__(256)
    dequantize_rows_any(const uint8_t* codes, const float* scale, T* out, int64_t columns,
                        int64_t groups, int64_t group_size) {
  const int64_t row = blockIdx.x;
  for (int64_t column = threadIdx.x; column < columns; column += blockDim.x) {
    const uint32_t pair = Decode<Format>::pair(codes[row * columns + column]);
    const float value = low_half<Half>(pair) * Decode<Format>::kFactor;
    out[row * columns + column] = narrow<T>(value * scale[row * groups + column / group_size]);
  }
}

// launch(kernel, blocks, threads, arguments...)
template <class Format, class T, class Launch>
void dispatch_dequantize(const uint8_t* codes, const float* scale, T* out, int64_t rows,
                         int64_t columns, int64_t groups, int64_t group_size,
                         const Launch& launch) {
  constexpr int kCodes = kVectorCodes<T>;
  if (rows == 0 || columns == 0) return;
  const bool fits = columns % kCodes == 0 && columns < int64_t{1} << 30 &&
                    (groups == 1 || group_size % kCodes == 0) &&
                    reinterpret_cast<uintptr_t>(codes) % kCodes == 0 &&
                    reinterpret_cast<uintptr_t>(out) % 16 == 0;
  const auto kernel = !fits         ? dequantize_rows_any<Format, T>
                      : groups == 1 ? dequantize_rows<Format, T, false>
                                    : dequantize_rows<Format, T, true>;
  const int threads = columns / kCodes >= 1024 ? 256 : 128;
  launch(kernel, rows, threads, codes, scale, out, columns, groups, group_size);
}

}  // namespace quantkit::cuda
