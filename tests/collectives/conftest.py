"""How hypothesis runs the properties of this folder."""

from hypothesis import HealthCheck, settings

# With other work on its processor a test may stand still for seconds, which says nothing of it.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")
