// rms_norm, quantize_rows, gate_mul, their combinations, and rotary: checks and launches.

#include <array>
#include <tuple>

#include "checks.h"
#include "launch_overlapped.h"
#include "ops.h"
#include "rows.cuh"

namespace quantkit::cuda {
namespace {

using MaybeTensor = std::optional<Tensor>;

// Launches what rows.cuh picks. All its kernels wait for the one before them.
class Start {
 public:
  explicit Start(const Launch& launch) : launch_(launch) {}

  template <class... Parameters, class... Arguments>
  void operator()(void (*kernel)(Parameters...), unsigned blocks, int threads,
                  const Arguments&... arguments) const {
    launch_overlapped(launch_.properties().architecture >= 90, kernel, dim3(blocks), threads, 0,
                      launch_.stream(), arguments...);
    launch_.check();
  }

 private:
  const Launch& launch_;
};

void check_like_x(const char* op, const char* argument, const Tensor& tensor, const Tensor& x) {
  if (shape_text(tensor.sizes()) != shape_text(x.sizes())) {
    fail(op, argument, "of x's shape " + shape_text(x.sizes()), shape_text(tensor.sizes()));
  }
  check_same_dtype(op, argument, tensor, x);
  check_layout(op, argument, tensor);
}

// Codes of some values, and the scales: one for each row, or a copy of the one that was given.
struct Quantized {
  const MaybeTensor& given;
  Tensor codes;
  Tensor scales;

  template <class T>
  void put_into(RowCall<T>& call) const {
    call.codes = mutable_data<uint8_t>(codes);
    call.scales = mutable_data<float>(scales);
    call.scale = data<float>(given);
  }
};

void check_scale(const char* op, const MaybeTensor& scale) {
  if (!scale.has_value()) return;
  if (scale->scalar_type() != ScalarType::Float) {
    fail(op, "scale", "float32", dtype_text(scale->scalar_type()));
  }
  check_shape(op, "scale", *scale, "[1]", {1});
  check_layout(op, "scale", *scale);
}

template <class Sizes>
Quantized new_quantized(const Tensor& x, const Sizes& sizes, int64_t rows,
                        const MaybeTensor& scale) {
  const int64_t count = scale.has_value() ? 1 : rows;
  const bool copy_now = scale.has_value() && x.numel() == 0;  // no kernel is going to
  return {scale, torch::stable::new_empty(x, sizes, ScalarType::Float8_e4m3fn),
          copy_now ? torch::stable::clone(*scale)
                   : torch::stable::new_empty(x, {count}, ScalarType::Float)};
}

// The arguments of the norms.
struct Norm {
  const char* op;
  const Tensor& x;
  const Tensor* delta;
  const Tensor& weight;
  double eps;

  Launch check(const MaybeTensor& scale) const {
    if (x.dim() < 1) fail(op, "x", "of shape [..., features]", shape_text(x.sizes()));
    check_layout(op, "x", x);
    if (delta != nullptr) check_like_x(op, "delta", *delta, x);
    check_shape(op, "weight", weight, "[features]", {columns()});
    check_layout(op, "weight", weight);
    check_norm_weight(op, "weight", weight, x);
    check_scale(op, scale);
    return launch_on(
        op, x,
        {{"delta", delta == nullptr ? weight : *delta}, {"weight", weight}, {"scale", scale}});
  }

  int64_t columns() const { return x.size(x.dim() - 1); }
  int64_t rows() const { return x.numel() == 0 ? 0 : x.numel() / columns(); }

  // Calls use(call, of the weight's type) with everything set but the results.
  template <class Use>
  void with_call(const Use& use) const {
    with_float_type(op, "x", x.scalar_type(), [&](auto type) {
      using T = decltype(type);
      if (rows() == 0) return;
      RowCall<T> call{};
      call.x = data<T>(x);
      if (delta != nullptr) call.delta = data<T>(*delta);
      call.weight = weight.const_data_ptr();
      call.rows = rows();
      call.columns = columns();
      call.eps = static_cast<float>(eps);
      if (weight.scalar_type() == x.scalar_type()) return use(call, T{});
      use(call, float{});
    });
  }
};

// gate_mul's argument [M, 2 I].
int64_t checked_half(const char* op, const Tensor& both) {
  check_shape(op, "both", both, "[M, 2 I]", {-1, -1});
  check_layout(op, "both", both);
  if (both.size(1) % 2 != 0) {
    fail(op, "both", "first halves, then as many second ones", shape_text(both.sizes()));
  }
  return both.size(1) / 2;
}

template <class T>
RowCall<T> gated_call(const Tensor& both, Activation activation) {
  RowCall<T> call{};
  call.x = data<T>(both);
  call.rows = both.size(0);
  call.columns = both.size(1) / 2;
  call.activation = activation;
  return call;
}

}  // namespace

Tensor rms_norm(Tensor x, Tensor weight, double eps) {
  const Norm norm{"rms_norm", x, nullptr, weight, eps};
  const Launch launch = norm.check(std::nullopt);
  Tensor out = torch::stable::new_empty(x, x.sizes());
  norm.with_call([&]<class T, class Weight>(RowCall<T>& call, Weight) {
    call.out = mutable_data<T>(out);
    call.aligned = is_aligned(call);
    start_process_rows<RowSource::kValues, true, false, Weight>(call, Start(launch));
  });
  return out;
}

std::tuple<Tensor, Tensor> add_rms_norm(Tensor x, Tensor delta, Tensor weight, double eps) {
  const Norm norm{"add_rms_norm", x, &delta, weight, eps};
  const Launch launch = norm.check(std::nullopt);
  Tensor sum = torch::stable::new_empty(x, x.sizes());
  Tensor out = torch::stable::new_empty(x, x.sizes());
  norm.with_call([&]<class T, class Weight>(RowCall<T>& call, Weight) {
    call.sum = mutable_data<T>(sum);
    call.out = mutable_data<T>(out);
    call.aligned = is_aligned(call);
    start_process_rows<RowSource::kSum, true, false, Weight>(call, Start(launch));
  });
  return {sum, out};
}

std::tuple<Tensor, Tensor> rms_norm_quantize(Tensor x, Tensor weight, double eps,
                                             std::optional<Tensor> scale) {
  const Norm norm{"rms_norm_quantize", x, nullptr, weight, eps};
  const Launch launch = norm.check(scale);
  const Quantized out = new_quantized(x, x.sizes(), norm.rows(), scale);
  norm.with_call([&]<class T, class Weight>(RowCall<T>& call, Weight) {
    out.put_into(call);
    call.aligned = is_aligned(call);
    start_process_rows<RowSource::kValues, true, true, Weight>(call, Start(launch));
  });
  return {out.codes, out.scales};
}

std::tuple<Tensor, Tensor, Tensor> add_rms_norm_quantize(Tensor x, Tensor delta, Tensor weight,
                                                         double eps, std::optional<Tensor> scale) {
  const Norm norm{"add_rms_norm_quantize", x, &delta, weight, eps};
  const Launch launch = norm.check(scale);
  Tensor sum = torch::stable::new_empty(x, x.sizes());
  const Quantized out = new_quantized(x, x.sizes(), norm.rows(), scale);
  norm.with_call([&]<class T, class Weight>(RowCall<T>& call, Weight) {
    call.sum = mutable_data<T>(sum);
    out.put_into(call);
    call.aligned = is_aligned(call);
    start_process_rows<RowSource::kSum, true, true, Weight>(call, Start(launch));
  });
  return {sum, out.codes, out.scales};
}

std::tuple<Tensor, Tensor> quantize_rows(Tensor x, std::optional<Tensor> scale) {
  const char* op = "quantize_rows";
  check_shape(op, "x", x, "[M, K]", {-1, -1});
  check_layout(op, "x", x);
  check_scale(op, scale);
  const Launch launch = launch_on(op, x, {{"scale", scale}});
  const Quantized out = new_quantized(x, x.sizes(), x.size(0), scale);
  with_float_type(op, "x", x.scalar_type(), [&](auto type) {
    using T = decltype(type);
    if (x.numel() == 0) return;
    RowCall<T> call{};
    call.x = data<T>(x);
    call.rows = x.size(0);
    call.columns = x.size(1);
    out.put_into(call);
    if (!scale.has_value()) {
      call.aligned = is_aligned(call);
      return start_process_rows<RowSource::kValues, false, true, T>(call, Start(launch));
    }
    call.columns *= call.rows;  // with one scale all is one row
    call.rows = 1;
    call.aligned = is_aligned(call);
    start_map_rows<RowSource::kValues, true>(call, Start(launch));
  });
  return {out.codes, out.scales};
}

Tensor gate_mul(Tensor both, std::string activation) {
  const char* op = "gate_mul";
  const Activation kind = activation_named(op, activation);
  const int64_t columns = checked_half(op, both);
  const Launch launch = launch_on(op, both, {});
  Tensor out = torch::stable::new_empty(both, {both.size(0), columns});
  with_float_type(op, "both", both.scalar_type(), [&](auto type) {
    using T = decltype(type);
    if (both.numel() == 0) return;
    RowCall<T> call = gated_call<T>(both, kind);
    call.out = mutable_data<T>(out);
    call.aligned = is_aligned(call);
    start_map_rows<RowSource::kGated, false>(call, Start(launch));
  });
  return out;
}

std::tuple<Tensor, Tensor> gate_mul_quantize(Tensor both, std::string activation,
                                             std::optional<Tensor> scale) {
  const char* op = "gate_mul_quantize";
  const Activation kind = activation_named(op, activation);
  const int64_t columns = checked_half(op, both);
  check_scale(op, scale);
  const Launch launch = launch_on(op, both, {{"scale", scale}});
  const int64_t rows = both.size(0);
  const Quantized out = new_quantized(both, std::array{rows, columns}, rows, scale);
  with_float_type(op, "both", both.scalar_type(), [&](auto type) {
    using T = decltype(type);
    if (both.numel() == 0) return;
    RowCall<T> call = gated_call<T>(both, kind);
    out.put_into(call);
    call.aligned = is_aligned(call);
    if (scale.has_value()) {
      start_map_rows<RowSource::kGated, true>(call, Start(launch));
    } else {
      start_process_rows<RowSource::kGated, false, true, T>(call, Start(launch));
    }
  });
  return {out.codes, out.scales};
}

Tensor rotary(Tensor x, Tensor cos, Tensor sin) {
  const char* op = "rotary";
  check_shape(op, "x", x, "[num_tokens, heads, head_dim]", {-1, -1, -1});
  check_rows(op, "x", x);
  const int64_t tokens = x.size(0);
  const int64_t head_dim = x.size(2);
  const int64_t rotary_dim = rotary_dim_of(op, cos, head_dim);
  for (const auto& [name, angles] : {std::pair{"cos", cos}, std::pair{"sin", sin}}) {
    check_shape(op, name, angles, "[num_tokens, rotary_dim]", {tokens, rotary_dim});
    check_layout(op, name, angles);
    check_same_dtype(op, name, angles, x);
  }
  const Launch launch = launch_on(op, x, {{"cos", cos}, {"sin", sin}});
  Tensor out = torch::stable::new_empty(x, x.sizes());
  with_float_type(op, "x", x.scalar_type(), [&](auto type) {
    using T = decltype(type);
    if (x.numel() == 0) return;
    RotaryCall<T> call{.x = data<T>(x),
                       .cosine = data<T>(cos),
                       .sine = data<T>(sin),
                       .out = mutable_data<T>(out),
                       .x_stride = x.stride(0),
                       .heads = x.size(1),
                       .head_dim = head_dim,
                       .rotary_dim = rotary_dim};
    call.aligned = is_aligned(call);
    start_rotate(call, tokens, Start(launch));
  });
  return out;
}

}  // namespace quantkit::cuda
