"""The vLLM KV connector, scheduler and worker side."""
