// The digest of the sources that the library is built from. Python looks for it in the library's bytes
// (shadowkv/ops/sources.py).

namespace {

[[gnu::used]] const char SOURCES[] = SHADOWKV_CPU_SOURCES;

}  // namespace
