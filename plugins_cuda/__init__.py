"""The custom ops of specbuild, one folder each: declaration, reference, body and kernels."""
