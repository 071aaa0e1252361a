// Portable kernels: plain C++ for any compiler and processor. Weights decode through a table, so
// NaN and infinite codes need no special care.

#include "kernel_template.h"

namespace quantkit {
namespace {

struct Portable {
  static constexpr int kLanes = 8;
  static constexpr int kColumns = 8;
  static constexpr int kMaxBatch = 4;
  static constexpr int weight_rows(int batch) { return batch == 1 ? 4 : 2; }

  // Compilers turn these loops of fixed length into whatever vectors the target has.
  struct Lanes {
    float lane[kLanes];

    static Lanes zero() { return {}; }
    static Lanes broadcast(float value) {
      Lanes out;
      for (float& lane : out.lane) lane = value;
      return out;
    }
    static Lanes load(const float* source) {
      Lanes out;
      for (int i = 0; i < kLanes; ++i) out.lane[i] = source[i];
      return out;
    }
    void store(float* target) const { __builtin_memcpy(target, lane, sizeof(lane)); }
    template <class T>
    static Lanes from(const T* source) {
      Lanes out;
      for (int i = 0; i < kLanes; ++i) out.lane[i] = to_float(source[i]);
      return out;
    }
    template <class T>
    void to(T* target) const {
      for (int i = 0; i < kLanes; ++i) from_float(lane[i], target + i);
    }
    static Lanes fma(const Lanes& a, const Lanes& b, const Lanes& c) {
      Lanes out;
      for (int i = 0; i < kLanes; ++i) out.lane[i] = a.lane[i] * b.lane[i] + c.lane[i];
      return out;
    }
    static Lanes mul(const Lanes& a, const Lanes& b) {
      Lanes out;
      for (int i = 0; i < kLanes; ++i) out.lane[i] = a.lane[i] * b.lane[i];
      return out;
    }
    static Lanes add(const Lanes& a, const Lanes& b) {
      Lanes out;
      for (int i = 0; i < kLanes; ++i) out.lane[i] = a.lane[i] + b.lane[i];
      return out;
    }
    static Lanes div(const Lanes& a, const Lanes& b) {
      Lanes out;
      for (int i = 0; i < kLanes; ++i) out.lane[i] = a.lane[i] / b.lane[i];
      return out;
    }
    static Lanes max(const Lanes& a, const Lanes& b) {
      Lanes out;
      for (int i = 0; i < kLanes; ++i) out.lane[i] = a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i];
      return out;
    }
    static Lanes exp(const Lanes& x) {
      Lanes out;
      for (int i = 0; i < kLanes; ++i) out.lane[i] = exp_or_zero(x.lane[i]);
      return out;
    }
    static Lanes sums(const Lanes (&v)[kLanes]) {
      Lanes out;
      for (int i = 0; i < kLanes; ++i) out.lane[i] = v[i].sum();
      return out;
    }
    float highest() const {
      float out = lane[0];
      for (int i = 1; i < kLanes; ++i) out = out > lane[i] ? out : lane[i];
      return out;
    }
    float sum() const {
      float out[kLanes / 2];
      for (int i = 0; i < kLanes / 2; ++i) out[i] = lane[i] + lane[i + kLanes / 2];
      return (out[0] + out[2]) + (out[1] + out[3]);
    }
  };

  template <class Format>
  struct Codes {
    static constexpr float kFactor = 1.0f;
    Lanes value;

    static Codes load(const uint8_t* codes) {
      Codes out;
      for (int i = 0; i < kColumns; ++i) out.value.lane[i] = kDecodeTable<Format>.value[codes[i]];
      return out;
    }
    static Codes load_some(const uint8_t* codes, int count) {
      uint8_t padded[kColumns] = {};
      __builtin_memcpy(padded, codes, count);
      return load(padded);
    }
    const Lanes& part(int) const { return value; }

    struct Peak {
      static Peak none() { return {}; }
      void add(const Codes&) {}
      bool special() const { return false; }
    };
  };

  static int slot(int column) { return column; }

  template <class T>
  struct Cells {
    static constexpr float kFactor = 1.0f;
    Lanes value;

    static Cells load(const T* x) { return {Lanes::from(x)}; }
    const Lanes& part(int) const { return value; }
  };

  template <class Format, class T>
  static void dequantize(const uint8_t* codes, float scale, T* out) {
    for (int i = 0; i < kColumns; ++i) {
      from_float(kDecodeTable<Format>.value[codes[i]] * scale, out + i);
    }
  }
};

}  // namespace

const KernelSet* portable_kernels() { return &kKernels<Portable>; }

}  // namespace quantkit
