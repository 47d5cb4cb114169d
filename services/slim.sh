#!/bin/sh
# Makes an environment of an image small: services/slim.sh FOLDER. Removes files that no process opens (tests, types,
# C headers, symbols for debuggers), and compiles Python once, because images are read-only.
set -eu
cd "$1/lib"
find . -type d -name tests -prune -exec rm -rf {} +
find . -type f \( -name '*.pyi' -o -name '*.pyx' -o -name '*.pxd' -o -name '*.[acho]' \) -delete
# Libraries in *.libs were rewritten by auditwheel, which strip can break.
find . -type f -name '*.so' -not -path '*.libs/*' -exec strip --strip-unneeded {} +
"$1/bin/python" -m compileall -q .
