"""The model as plain Python over the kernels: layers, sequence state, slices of consecutive layers."""
