"""The layer loops of vision and prefill in C++: any size costs a few microseconds of host time a launch, and no graph.

`build.py` compiles and loads the library, `bridge.py` calls it, and `kernels.py` describes the Triton kernels that are
already loaded, so that C++ launches them through the driver: no kernel is written twice. Of the sources, `bridge.cpp`
alone sees Python and the loops; `grid.cpp` makes the images' tables on the host; `vision.cpp` and `prefill.cpp` are the
loops, over the steps of `device.h`; a CPU makes the steps by ATen's operators (`cpu_device.cpp`), a GPU by launches
(`cuda_*`). The stages are the loops' reference.
"""
