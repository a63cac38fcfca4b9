"""What a StableHLO program holds and costs, comparison of two, compilers for absent hardware."""
