// torch's CPU build has no guard of CUDA devices, which operations on them ask for. This one has
// one device, and guards nothing.
#include <c10/core/impl/DeviceGuardImplInterface.h>
C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>)
