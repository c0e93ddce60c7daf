"""Known wrong kernels: one small class per reported bug, each overriding one step of the honest EAGER kernel."""
