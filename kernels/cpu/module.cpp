// The Python module `millrace_kernels._cpu`: CPU kernels over raw addresses.

#include "bindings.hpp"

NB_MODULE(_cpu, m) {
  using namespace millrace;
  m.doc() = "CPU kernels over raw addresses; call them through millrace_kernels.api.";
  nb::enum_<Type>(m, "Type").value("F32", Type::f32).value("BF16", Type::b16);
  bind_isa(m);
  bind_attention(m);
  bind_linear(m);
  bind_rows(m);
  bind_sampling(m);
}
