"""Rates for tests, about what an H200 reaches."""

from pallas_kernels.hopper.gpus import Gpu

H200_MEASURED = Gpu("H200, measured", tflops_16=760.0, tflops_8=1450.0, tbs=4.45)
