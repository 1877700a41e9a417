"""The sampler of NextStep, which draws one continuous token after another."""
