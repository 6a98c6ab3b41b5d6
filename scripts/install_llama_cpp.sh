#!/bin/sh
# install_llama_cpp.sh FOLDER: llama.cpp's server for the CPU of this machine, in FOLDER.
#
# The npm packages of node-llama-cpp hold llama.cpp's libraries, built for many kinds of CPUs, and the sources of the same
# version. This script downloads both (46 MB) and compiles the server's own files against the libraries. It needs npm, git and
# g++, on Linux; elsewhere install llama.cpp as its pages say and leave llama-server on the PATH.
set -e
VERSION=3.22.1
case "$(uname -sm)" in
  "Linux x86_64") MACHINE=linux-x64 ;;
  "Linux aarch64") MACHINE=linux-arm64 ;;
  *) echo "$(uname -sm): this script installs llama.cpp on Linux alone; install it yourself and put llama-server on the PATH" >&2; exit 2 ;;
esac
for program in npm git g++; do
  command -v $program > /dev/null || { echo "$program is missing: install npm, git and g++ first" >&2; exit 2; }
done

mkdir -p "$1"
FOLDER=$(cd "$1" && pwd)
BUILD=$(mktemp -d)
trap 'rm -rf "$BUILD"' EXIT
cd "$BUILD"
npm pack --silent "@node-llama-cpp/$MACHINE@$VERSION" "node-llama-cpp@$VERSION" > /dev/null
tar xzf "node-llama-cpp-$MACHINE-$VERSION.tgz" -C "$FOLDER" --strip-components=3 "package/bins/$MACHINE"
tar xzf "node-llama-cpp-$VERSION.tgz" package/llama/gitRelease.bundle
git clone --quiet package/llama/gitRelease.bundle sources 2> /dev/null

# The server without its web page.
mkdir objects
cat > objects/ui.h << 'END'
#pragma once
#include <array>
#include <cstddef>
#include <string>
struct llama_ui_asset { std::string name; const unsigned char * data; size_t size; std::string type, etag; };
inline const llama_ui_asset * llama_ui_find_asset(const std::string &) { return nullptr; }
inline const std::array<llama_ui_asset, 0> & llama_ui_get_assets() { static const std::array<llama_ui_asset, 0> none{}; return none; }
inline bool llama_ui_use_gzip() { return false; }
END
cat > objects/Makefile << 'END'
SOURCES := $(wildcard ../sources/tools/server/*.cpp)
INCLUDE := $(addprefix -I../sources/,include common ggml/include vendor tools/mtmd tools/server .) -I.
objects: $(patsubst ../sources/tools/server/%.cpp,%.o,$(SOURCES))
%.o: ../sources/tools/server/%.cpp
	g++ -O1 -std=c++17 $(INCLUDE) -c $< -o $@
END
make --silent --jobs=2 --directory=objects objects
# Images and sound are not in the libraries: each function for them becomes one that does nothing.
nm -u objects/*.o | awk '{print $2}' | grep -E '^(_Z[0-9]+)?mtmd_' | sort -u | sed 's/.*/long &(void) { return 0; }/' > objects/stubs.c
gcc -c objects/stubs.c -o objects/stubs.o
# Programs lie beside the libraries, because ggml looks for its CPU kernels there.
g++ objects/*.o -o "$FOLDER/llama-server" -L"$FOLDER" -l:libllama-common.so \
  -l:"$(basename "$FOLDER"/libllama.v*.so)" -l:"$(basename "$FOLDER"/libggml.v*.so)" -l:libggml-base.so \
  -Wl,-rpath,\$ORIGIN -Wl,--allow-shlib-undefined -pthread
"$FOLDER/llama-server" --version
