"""The custom ops of specbuild, one folder each: declaration, reference, bodies and kernels."""
