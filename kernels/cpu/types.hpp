// Types that the CPU kernels share. Nothing here depends on Python or torch.

#pragma once

#include <cstdint>

namespace millrace {

struct bf16 {
  std::uint16_t bits;
};

enum class Type : int { f32 = 0, b16 = 1 };

}  // namespace millrace
