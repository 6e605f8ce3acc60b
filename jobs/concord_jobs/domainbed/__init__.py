"""DomainBed's protocol on MNIST (Gulrajani and Lopez-Paz, In Search of Lost Domain Generalization, 2021)."""
