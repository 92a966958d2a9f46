// For a build of torch without CUDA: the device guard of cuda:0, which does nothing. No tensor has
// data there, and nothing runs there. Compiled by pretended_gpu_engine.py.
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::EventFlag;
using c10::Stream;

struct PretendedGpuGuard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device device) const override { return device; }
  Device getDevice() const override { return Device(DeviceType::CUDA, 0); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return Stream(Stream::DEFAULT, getDevice()); }
  Stream getDefaultStream(Device) const override { return getStream(getDevice()); }
  Stream exchangeStream(Stream stream) const override { return stream; }
  // None, so that the autograd engine starts no thread for it.
  DeviceIndex deviceCount() const noexcept override { return 0; }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};

C10_REGISTER_GUARD_IMPL(CUDA, PretendedGpuGuard)

}  // namespace
