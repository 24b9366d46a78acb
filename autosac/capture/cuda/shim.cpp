// PyTorch believes in CUDA devices on a machine without any, or leaves alone the ones that are there.
//
// Nothing is allocated or run on these devices: they are for fake tensors. The device guard lets operators name "cuda". The
// hooks make it the accelerator, so that autograd has a device to run backward on and generators have a device of their own.
// They are registered with preference, so that they also win over the hooks of a CUDA build.
//
// Built once per version of torch (shim.py) and loaded before the hooks are first asked for, which happens when torch is
// imported with a GPU around. Checked with torch 2.13 (CPU build) and 2.14 (CUDA build).
#include <ATen/core/Generator.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/GeneratorImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

namespace {

std::atomic<c10::DeviceIndex> devices{1};
thread_local c10::DeviceIndex current = 0;
std::atomic<int64_t> streams{0};

c10::DeviceIndex exchange(c10::DeviceIndex index) {
  auto before = current;
  if (index >= 0)
    current = index;
  return before;
}

// A generator has a seed and an offset, and no numbers. Its state is CUDA's: 8 bytes of each.
struct SimulatedGenerator final : public c10::GeneratorImpl {
  explicit SimulatedGenerator(c10::DeviceIndex index)
      : c10::GeneratorImpl(c10::Device(c10::kCUDA, index), c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}
  void set_current_seed(uint64_t seed) override { seed_ = seed, offset_ = 0; }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override { return seed_; }
  void set_state(const c10::TensorImpl& state) override {
    const auto* words = static_cast<const uint64_t*>(state.data());
    seed_ = words[0], offset_ = words[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::detail::empty_cpu({16}, at::kByte);
    const uint64_t words[2] = {seed_, offset_};
    std::memcpy(state.data_ptr(), words, sizeof words);
    return state.getIntrusivePtr();
  }
  GeneratorImpl* clone_impl() const override {
    auto* copy = new SimulatedGenerator(device().index());
    copy->seed_ = seed_, copy->offset_ = offset_;
    return copy;
  }

  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
};

at::Generator new_generator(c10::DeviceIndex index) {
  return at::make_generator<SimulatedGenerator>(index < 0 ? current : index);
}

// Pinned memory is the host's own memory, of which is known what was asked for as pinned: DDP insists on it.
struct PinnedMemory final : public c10::Allocator {
  static PinnedMemory& get() {
    static auto* memory = new PinnedMemory();
    return *memory;
  }
  c10::DataPtr allocate(size_t size) override {
    auto data = c10::GetCPUAllocator()->allocate(size);
    void* start = data.get();
    const std::lock_guard<std::mutex> lock(mutex_);
    blocks_[static_cast<const char*>(start)] = size;
    return {start, data.release_context(), &release, data.device()};
  }
  void copy_data(void* to, const void* from, size_t count) const override { default_copy_data(to, from, count); }
  bool holds(const void* pointer) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto* address = static_cast<const char*>(pointer);
    auto after = blocks_.upper_bound(address);
    return after != blocks_.begin() && address < std::prev(after)->first + std::prev(after)->second;
  }

 private:
  static void release(void* start) {
    {
      const std::lock_guard<std::mutex> lock(get().mutex_);
      get().blocks_.erase(static_cast<const char*>(start));
    }
    c10::GetCPUAllocator()->raw_deallocate(start);
  }
  std::mutex mutex_;
  std::map<const char*, size_t> blocks_;
};

struct SimulatedGuard final : public c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = c10::DeviceType::CUDA;
  c10::DeviceType type() const override { return static_type; }
  c10::Device exchangeDevice(c10::Device device) const override { return {static_type, exchange(device.index())}; }
  c10::Device getDevice() const override { return {static_type, current}; }
  void setDevice(c10::Device device) const override { exchange(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { exchange(device.index()); }
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return c10::Stream(c10::Stream::UNSAFE, device, ++streams); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return devices; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void synchronizeEvent(void*) const override {}
};

c10::impl::DeviceGuardImplRegistrar guard(c10::DeviceType::CUDA, new SimulatedGuard());

} // namespace

namespace at {

struct SimulatedHooks : public CUDAHooksInterface {
  explicit SimulatedHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool hasMAGMA() const override { return true; }
  bool hasCuDNN() const override { return true; }
  bool hasCuSOLVER() const override { return true; }
  bool hasCuBLASLt() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex deviceCount() const override { return devices; }
  int getNumGPUs() const override { return devices; }
  void setCurrentDevice(DeviceIndex index) const override { exchange(index); }
  DeviceIndex getCurrentDevice() const override { return current; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return exchange(index); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchange(index); }
  bool isPinnedPtr(const void* pointer) const override { return PinnedMemory::get().holds(pointer); }
  Allocator* getPinnedMemoryAllocator() const override { return &PinnedMemory::get(); }
  const Generator& getDefaultGenerator(DeviceIndex index) const override {
    static std::vector<Generator>* generators = [] {
      auto* made = new std::vector<Generator>();
      for (DeviceIndex i = 0; i < devices; ++i)
        made->push_back(new_generator(i));
      return made;
    }();
    return generators->at(index < 0 ? current : index);
  }
  Generator getNewGenerator(DeviceIndex index) const override { return new_generator(index); }
  std::string showConfig() const override { return "  - CUDA Runtime (simulated)\n"; }
  int64_t cuFFTGetPlanCacheMaxSize(DeviceIndex) const override { return plans; }
  void cuFFTSetPlanCacheMaxSize(DeviceIndex, int64_t size) const override { plans = size; }
  int64_t cuFFTGetPlanCacheSize(DeviceIndex) const override { return 0; }
  void cuFFTClearPlanCache(DeviceIndex) const override {}
  mutable int64_t plans = 4096;
};

// "CUDAHooks" is the name that ATen asks for.
static RegistererCUDAHooksRegistry
    hooks("CUDAHooks", c10::REGISTRY_PREFERRED, CUDAHooksRegistry(), RegistererCUDAHooksRegistry::DefaultCreator<SimulatedHooks>, "");

} // namespace at

namespace c10d {

// DDP's reducer takes statistics of its first steps; a CUDA build does it by events of the device.
struct SimulatedTimer : public Timer {
  explicit SimulatedTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};

static RegistererTimerRegistry
    timer(c10::kCUDA, c10::REGISTRY_PREFERRED, TimerRegistry(), RegistererTimerRegistry::DefaultCreator<SimulatedTimer>, "");

} // namespace c10d

extern "C" {
void autosac_set_device_count(int count) { devices = static_cast<c10::DeviceIndex>(count); }
int autosac_current_device() { return current; }
void autosac_set_device(int index) { exchange(static_cast<c10::DeviceIndex>(index)); }
}
