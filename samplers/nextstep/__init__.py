"""The sampler of NextStep, which generates one continuous token after another."""
