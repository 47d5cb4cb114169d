// Which instruction set is in use.

#include <stdexcept>
#include <string>

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "bindings.hpp"

namespace millrace {
namespace {

// Whether the processor multiplies tiles of bfloat16, and Linux lets this process use them.
bool has_amx() {
#if defined(__x86_64__) && defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  static const bool has = __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
                          syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return has;
#else
  return false;
#endif
}

std::vector<const Kernels*> available() {
  std::vector<const Kernels*> tables;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const bool pairs = avx512 && __builtin_cpu_supports("avx512bf16");
  // Measured on Emerald Rapids: vectors multiply pairs of bfloat16 at half the rate of floats.
  const bool pairs_are_slow = __builtin_cpu_is("intel");
  if (pairs && has_amx()) tables.push_back(&amx_kernels());
  if (pairs && !pairs_are_slow) tables.push_back(&avx512_bf16_kernels());
  if (avx512) tables.push_back(&avx512_kernels());
  if (pairs && pairs_are_slow) tables.push_back(&avx512_bf16_kernels());
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    tables.push_back(&avx2_kernels());
#endif
  tables.push_back(&portable_kernels());
  return tables;
}

const Kernels* g_kernels = available().front();
bool g_alike = false;

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const Kernels* table : available()) names.emplace_back(table->name);
  return names;
}

void use_instruction_set(const std::string& name) {
  for (const Kernels* table : available())
    if (name == table->name) {
      g_kernels = table;
      return;
    }
  throw std::invalid_argument("no instruction set " + name + " on this machine");
}

void compute_rows_alike(bool alike) { g_alike = alike; }

std::string instruction_set() { return g_kernels->name; }

}  // namespace

const Kernels& kernels() { return *g_kernels; }

bool rows_are_alike() { return g_alike; }

const LinearKernels& linear_kernels(Type type, std::int64_t rows) {
  const bool in_tiles = g_kernels->has_matrix_unit && type == Type::b16 && rows > kFewRows;
  return g_alike || in_tiles ? g_kernels->alike_linear : g_kernels->fast_linear;
}

void bind_isa(nb::module_& m) {
  using namespace nb::literals;
  m.def("instruction_sets", &instruction_sets, "Those that this machine runs, fastest first.");
  m.def("instruction_set", &instruction_set, "The one in use.");
  m.def("use_instruction_set", &use_instruction_set, "name"_a,
        "Take another; raises ValueError when this machine lacks it.");
  m.def("compute_rows_alike", &compute_rows_alike, "alike"_a,
        "Whether a row gets the same bits among any number of rows, or as fast as can be.");
}

}  // namespace millrace
