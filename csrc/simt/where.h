// The place in the source that called a primitive.
#pragma once

namespace specdec::simt {

struct Where {
  const char* file = "";
  int line = 0;

  // As a defaulted argument of a function, this is where that function was called.
  static constexpr Where here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
};

}  // namespace specdec::simt
