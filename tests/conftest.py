"""What holds for every test: no example is judged by how long it took, since machines are noisy."""

from hypothesis import settings

settings.register_profile("loopd", deadline=None)
settings.load_profile("loopd")
