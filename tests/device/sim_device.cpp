// A simulated asynchronous accelerator with two devices, as a PrivateUse1 backend of torch.
//
// 1. Device memory is mapped twice: torch has the addresses of a mapping that nobody may touch (a host that does is killed); the
//    workers use the other one.
// 2. Each stream is a queue with a thread. A kernel is the CPU's kernel, run there on raw addresses: it keeps no tensor alive, so
//    memory that is freed or reused too early is overwritten, as on a real device.
// 3. Memory is cached by stream and size, and never given back; `record_stream` keeps it from being reused.
// 4. A link joins the host and the devices. What it copies, and every wait of the host, is counted.
// 5. A gate holds a stream, or the link, until the test opens it: so tests need no sleeps. One that nobody opens, as what would is
//    waiting, opens by itself after five minutes, and says so.
// 6. To make a device current is counted where CUDA would make a context there. CUDA's events switch to their device and back, and
//    so do they when they are destroyed; a guard of torch goes back without making one.
//
// It includes what it needs of torch and no more: to read its headers is most of the compiler's work.
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/strides.h>
#include <sys/mman.h>
#include <torch/library.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

namespace sim {

using c10::Device;
using c10::DeviceIndex;
using c10::IValue;
using c10::StreamId;
using Work = std::function<void()>;
using Lock = std::unique_lock<std::mutex>;

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 2;
constexpr size_t kArena = size_t(1) << 32;
constexpr size_t kSmallPageable = 64 << 10;  // a driver takes so much of pageable memory before it returns

// ---- counters ----

enum Counter { D2H, H2D, PAGEABLE, BLOCKING, WAITS, TEMPORARIES, LARGEST_TEMPORARY, RESERVED, PINNED, LINK_BYTES, KERNELS, NUM };

std::mutex mutex;  // of all that follows, but the queues
int64_t counters[NUM];
auto& synchronizations = *new std::map<int64_t, int64_t>;  // by thread
auto& devices_set = *new std::set<std::pair<int64_t, int64_t>>;  // thread and device
int64_t kernel_us = 0, link_bytes_per_s = 0;

void count(Counter which, int64_t by = 1) {
  Lock lock(mutex);
  counters[which] += by;
}

void count_synchronization() {
  Lock lock(mutex);
  synchronizations[gettid()]++;
}

// ---- gates ----

struct Gate {
  std::mutex mutex;
  std::condition_variable changed;
  bool open = true, forced = false;

  static std::chrono::seconds patience() {
    const char* given = getenv("SIMULATED_PATIENCE_S");
    return std::chrono::seconds(given ? atoi(given) : 300);
  }
  void pass() {
    Lock lock(mutex);
    if (!changed.wait_for(lock, patience(), [&] { return open; })) open = forced = true;
  }
  void set(bool to) {
    Lock lock(mutex);
    open = to;
    changed.notify_all();
  }
};
auto& gates = *new std::vector<std::shared_ptr<Gate>>{std::make_shared<Gate>()};  // the first one is the link's

// ---- streams and events ----

struct Queue {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Work> works;
  uint64_t queued = 0, done = 0;

  uint64_t push(Work work) {
    Lock lock(mutex);
    if (!queued) std::thread([this] { run(); }).detach();
    works.push_back(std::move(work));
    changed.notify_all();
    return ++queued;
  }
  void run() {
    at::AutoDispatchBelowADInplaceOrView guard;
    while (true) {
      Lock lock(mutex);
      changed.wait(lock, [&] { return !works.empty(); });
      Work work = std::move(works.front());
      works.pop_front();
      lock.unlock();
      try {
        work();
      } catch (const std::exception& error) {
        fprintf(stderr, "a kernel of the simulated device failed: %s\n", error.what());
        abort();
      }
      lock.lock();
      done++;
      changed.notify_all();
    }
  }
  bool passed(uint64_t ticket) {
    Lock lock(mutex);
    return done >= ticket;
  }
  void wait(uint64_t ticket) {
    Lock lock(mutex);
    changed.wait(lock, [&] { return done >= ticket; });
  }
  uint64_t last() {
    Lock lock(mutex);
    return queued;
  }
};

struct Event {  // the point of a queue that it was recorded at
  Queue* queue = nullptr;
  uint64_t ticket = 0;
};

auto& queues = *new std::array<std::deque<Queue>, kDevices>;
thread_local DeviceIndex current_device = 0;
thread_local StreamId current_stream[kDevices] = {0, 0};

Queue& queue_of(DeviceIndex device, StreamId id) {
  Lock lock(mutex);
  auto& of_device = queues[device];
  while (of_device.size() <= size_t(id)) of_device.emplace_back();
  return of_device[id];
}
Queue& current_queue(DeviceIndex device) { return queue_of(device, current_stream[device]); }

uint64_t launch(DeviceIndex device, Work work) {
  count(KERNELS);
  return current_queue(device).push([work = std::move(work)] {
    if (kernel_us) usleep(kernel_us);
    work();
  });
}

void synchronize(Queue& queue, uint64_t ticket) {
  count_synchronization();
  queue.wait(ticket);
}

void use_device(DeviceIndex device) {
  Lock lock(mutex);
  devices_set.insert({gettid(), device});
}

void set_device(DeviceIndex device) {
  TORCH_CHECK(device >= 0 && device < kDevices, "no simulated device ", int(device));
  current_device = device;
  use_device(device);
}

void switch_device(DeviceIndex device) {
  if (device != current_device) set_device(device);
}

struct Switched {  // to a device, and back, as CUDA's events do
  DeviceIndex before = current_device;
  explicit Switched(DeviceIndex device) { switch_device(device); }
  ~Switched() { switch_device(before); }
};

// ---- memory ----

struct Arena {
  char *device, *host;
  size_t used = 0;
};

std::array<Arena, kDevices>& arenas() {
  static auto& made = *[] {
    auto* out = new std::array<Arena, kDevices>;
    for (auto& arena : *out) {
      int fd = memfd_create("simulated device", 0);
      TORCH_CHECK(fd >= 0 && !ftruncate(fd, kArena), "no memory for a simulated device");
      arena.device = (char*)mmap(nullptr, kArena, PROT_NONE, MAP_SHARED, fd, 0);
      arena.host = (char*)mmap(nullptr, kArena, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    }
    return out;
  }();
  return made;
}

void* for_worker(const void* data) {
  for (auto& arena : arenas())
    if (data >= arena.device && data < arena.device + kArena) return arena.host + ((char*)data - arena.device);
  return const_cast<void*>(data);
}

struct Block {
  DeviceIndex device;
  StreamId stream;
  size_t size;
  std::set<StreamId> users;
};
auto& blocks = *new std::map<void*, Block>;
auto& idle = *new std::map<std::tuple<DeviceIndex, StreamId, size_t>, std::vector<void*>>;
auto& leaving = *new std::vector<std::pair<void*, std::vector<Event>>>;  // freed, but other streams are not done with them

void free_block(void* data) {
  Lock lock(mutex);
  Block& block = blocks.at(data);
  std::vector<Event> events;
  for (StreamId user : block.users) {
    auto& queue = queues[block.device][user];
    events.push_back({&queue, queue.last()});
  }
  block.users.clear();
  if (events.empty())
    idle[{block.device, block.stream, block.size}].push_back(data);
  else
    leaving.emplace_back(data, std::move(events));
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t wanted) override {
    Device device(kType, current_device);
    if (!wanted) return {nullptr, nullptr, &free_block, device};
    size_t size = (wanted + 511) / 512 * 512;
    Lock lock(mutex);
    for (size_t i = 0; i < leaving.size();) {
      auto& [data, events] = leaving[i];
      if (std::all_of(events.begin(), events.end(), [](Event& e) { return e.queue->passed(e.ticket); })) {
        Block& block = blocks.at(data);
        idle[{block.device, block.stream, block.size}].push_back(data);
        leaving.erase(leaving.begin() + i);
      } else {
        i++;
      }
    }
    auto stream = current_stream[current_device];
    auto& cached = idle[{current_device, stream, size}];
    void* data;
    if (cached.empty()) {
      Arena& arena = arenas()[current_device];
      TORCH_CHECK(arena.used + size <= kArena, "the simulated device is out of memory");
      data = arena.device + arena.used;
      arena.used += size;
      counters[RESERVED] += size;
    } else {
      data = cached.back();
      cached.pop_back();
    }
    blocks[data] = {current_device, stream, size, {}};
    return {data, data, &free_block, device};
  }
  void copy_data(void* dest, const void* src, size_t size) const override {
    launch(current_device, [=] { memcpy(for_worker(dest), for_worker(src), size); });
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
} device_allocator;
REGISTER_ALLOCATOR(kType, &device_allocator);

// Pinned memory, as torch allocates it: rounded to powers of two, and never given back.
auto& pinned = *new std::map<char*, size_t>;
auto& idle_pinned = *new std::map<size_t, std::vector<char*>>;

void unpin(void* data) {
  Lock lock(mutex);
  idle_pinned[pinned.at((char*)data)].push_back((char*)data);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t wanted) override {
    if (!wanted) return {nullptr, nullptr, &unpin, c10::kCPU};
    size_t size = 1 << 12;
    while (size < wanted) size *= 2;
    Lock lock(mutex);
    auto& cached = idle_pinned[size];
    char* data;
    if (cached.empty()) {
      data = (char*)mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      pinned[data] = size;
      counters[PINNED] += size;
    } else {
      data = cached.back();
      cached.pop_back();
    }
    return {data, data, &unpin, c10::kCPU};
  }
  void copy_data(void* dest, const void* src, size_t size) const override { memcpy(dest, src, size); }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
} pinned_allocator;

bool is_pinned(const void* data) {
  Lock lock(mutex);
  auto after = pinned.upper_bound((char*)data);
  return after != pinned.begin() && (char*)data < std::prev(after)->first + std::prev(after)->second;
}

// ---- what torch asks of a backend ----

DeviceIndex index_of(Device device) { return device.has_index() ? device.index() : current_device; }
c10::Stream stream_of(DeviceIndex index, StreamId id) { return c10::Stream(c10::Stream::UNSAFE, {kType, index}, id); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  Device exchangeDevice(Device to) const override {
    Device before = getDevice();
    switch_device(to.index());
    return before;
  }
  Device getDevice() const override { return {kType, current_device}; }
  void setDevice(Device to) const override { switch_device(to.index()); }
  void uncheckedSetDevice(Device to) const noexcept override { current_device = to.index(); }
  c10::Stream getStream(Device d) const noexcept override { return stream_of(index_of(d), current_stream[index_of(d)]); }
  c10::Stream getDefaultStream(Device d) const override { return stream_of(index_of(d), 0); }
  c10::Stream getNewStream(Device d, int) const override {
    auto index = index_of(d);
    queue_of(index, 0);
    Lock lock(mutex);
    queues[index].emplace_back();
    return stream_of(index, queues[index].size() - 1);
  }
  c10::Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  c10::Stream exchangeStream(c10::Stream to) const noexcept override {
    auto before = getStream(to.device());
    current_stream[to.device_index()] = to.id();
    return before;
  }
  void destroyEvent(void* event, const DeviceIndex device) const noexcept override {
    if (!event) return;
    Switched switched(device);
    delete (Event*)event;
  }
  void record(void** event, const c10::Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    Switched switched(stream.device_index());
    if (!*event) *event = new Event;
    auto& queue = queue_of(stream.device_index(), stream.id());
    *(Event*)*event = {&queue, queue.last()};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event) return;
    Switched switched(stream.device_index());
    count(WAITS);
    Event at = *(Event*)event;
    auto& queue = queue_of(stream.device_index(), stream.id());
    if (&queue != at.queue) queue.push([at] { at.queue->wait(at.ticket); });
  }
  bool queryEvent(void* event) const override {
    auto* at = (Event*)event;
    return !at || at->queue->passed(at->ticket);
  }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  bool queryStream(const c10::Stream& stream) const override {
    auto& queue = queue_of(stream.device_index(), stream.id());
    return queue.passed(queue.last());
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    auto& queue = queue_of(stream.device_index(), stream.id());
    synchronize(queue, queue.last());
  }
  void synchronizeEvent(void* event) const override {
    if (event) synchronize(*((Event*)event)->queue, ((Event*)event)->ticket);
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    Switched switched(device);
    for (size_t id = 0; id < queues[device].size(); id++) synchronize(queues[device][id], queues[device][id].last());
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    Lock lock(mutex);
    auto found = blocks.find(data.get());
    if (found != blocks.end() && found->second.stream != stream.id()) found->second.users.insert(stream.id());
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {  // older releases lack some of these, so none says `override`
  bool isBuilt() const { return true; }
  bool isAvailable() const { return true; }
  bool hasPrimaryContext(DeviceIndex) const { return true; }
  DeviceIndex deviceCount() const { return kDevices; }
  void setCurrentDevice(DeviceIndex device) const { set_device(device); }
  DeviceIndex getCurrentDevice() const { return current_device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const { return Guard().exchangeDevice({kType, device}).index(); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const { return std::exchange(current_device, device); }
  bool isPinnedPtr(const void* data) const { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const { return &pinned_allocator; }
  Device getDeviceFromPtr(void*) const { return {kType, current_device}; }
};

// ---- copies ----

at::Tensor raw(const at::Tensor& tensor) {  // as the workers see it; keeps nothing alive
  return at::from_blob(for_worker(tensor.data_ptr()), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
}

at::Tensor empty_like(const at::Tensor& like, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
  c10::OptionalDeviceGuard guard(like.device());
  return at::detail::empty_strided_generic(sizes, strides, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype);
}

at::Tensor temporary(const at::Tensor& like, at::ScalarType dtype) {
  auto out = empty_like(like, like.sizes(), c10::contiguous_strides(like.sizes()), dtype);
  Lock lock(mutex);
  counters[TEMPORARIES]++;
  counters[LARGEST_TEMPORARY] = std::max<int64_t>(counters[LARGEST_TEMPORARY], out.nbytes());
  return out;
}

void over_link(DeviceIndex device, Counter direction, void* to, const void* from, size_t size) {
  {
    Lock lock(mutex);
    counters[direction]++;
    counters[LINK_BYTES] += size;
  }
  launch(device, [=] {
    gates[0]->pass();
    if (link_bytes_per_s) usleep(size * 1000000 / link_bytes_per_s);
    memcpy(for_worker(to), for_worker(from), size);
  });
}

void on_device(DeviceIndex device, const at::Tensor& from, const at::Tensor& to) {
  launch(device, [from = raw(from), to = raw(to)] { to.copy_(from); });
}

void to_host(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  auto device = self.device().index();
  auto source = self.is_contiguous() && self.scalar_type() == dst.scalar_type() ? self : temporary(self, dst.scalar_type());
  if (!source.is_same(self)) on_device(device, self, source);
  auto target = dst.is_contiguous() ? dst : at::empty(dst.sizes(), dst.options());
  bool pageable = !is_pinned(target.data_ptr());
  over_link(device, D2H, target.data_ptr(), source.data_ptr(), target.nbytes());
  if (pageable) count(PAGEABLE);
  if (pageable || !non_blocking || !target.is_same(dst)) {
    count(BLOCKING);
    auto& queue = current_queue(device);
    synchronize(queue, queue.last());
    if (!target.is_same(dst)) dst.copy_(target);
  }
}

void to_device(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  auto device = dst.device().index();
  auto source = self.expand(dst.sizes()).to(dst.scalar_type()).contiguous();
  auto target = dst.is_contiguous() ? dst : temporary(dst, dst.scalar_type());
  bool pageable = !is_pinned(source.data_ptr()), small = source.nbytes() <= kSmallPageable;
  if (pageable) count(PAGEABLE);
  at::Tensor taken = source;
  if (pageable && small) taken = source.clone();
  over_link(device, H2D, target.data_ptr(), taken.data_ptr(), source.nbytes());
  if (!target.is_same(dst)) on_device(device, target, dst);
  if (pageable && small) current_queue(device).push([taken] {});  // keeps it until then
  if (!non_blocking || (pageable && !small) || (!pageable && source.data_ptr() != self.data_ptr())) {
    if (!(pageable && small)) count(BLOCKING);
    auto& queue = current_queue(device);
    if (!(pageable && small)) synchronize(queue, queue.last());
  }
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  c10::OptionalDeviceGuard guard(self.device().type() == kType ? self.device() : dst.device());
  if (!dst.numel()) return dst;
  if (dst.device().is_cpu()) {
    to_host(self.expand(dst.sizes()), dst, non_blocking);
  } else if (self.device().is_cpu()) {
    to_device(self, dst, non_blocking);
  } else {
    if (self.device() != dst.device()) {
      auto& there = current_queue(dst.device().index());
      synchronize(there, there.last());
    }
    on_device(self.device().index(), self.expand(dst.sizes()), dst);
    if (self.device() != dst.device()) {
      auto& here = current_queue(self.device().index());
      synchronize(here, here.last());
    }
  }
  return dst;
}

// ---- kernels ----

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> device,
                 std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  auto strides = stride.empty() ? c10::contiguous_strides(size) : c10::DimVector(stride);
  impl->set_sizes_and_strides(size, strides, offset);
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage storage) {
  int64_t size = storage.nbytes() / self.dtype().itemsize();
  return set_storage(self, std::move(storage), 0, size, {});
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto fresh = empty_like(self, size, c10::contiguous_strides(size), self.scalar_type());
  auto* impl = self.unsafeGetTensorImpl();
  if (fresh.nbytes() > self.storage().nbytes()) {
    TORCH_CHECK(!self.numel(), "a simulated device resizes empty tensors only");
    impl->set_storage_keep_dtype(fresh.storage());
  }
  impl->set_sizes_contiguous(size);
  return self;
}

at::Scalar local_scalar(const at::Tensor& self) {
  auto out = at::empty(self.sizes(), self.options().device(at::kCPU));
  to_host(self, out, false);
  return out.item();
}

void record_stream(at::Tensor& self, c10::Stream stream) { Guard().recordDataPtrOnStream(self.storage().data_ptr(), stream); }

template <typename Change>
IValue each_tensor(const IValue& value, Change change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> out;
    for (const at::Tensor& tensor : value.toTensorVector()) out.push_back(change(tensor));
    return out;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> out;
    for (const std::optional<at::Tensor>& t : value.toOptionalTensorVector())
      out.push_back(t ? std::optional<at::Tensor>(change(*t)) : std::nullopt);
    return out;
  }
  if (value.isDevice()) return Device(c10::kCPU);
  return value;
}

// Any operator: queue the CPU's kernel. What it returns is known at once: the argument that it writes to, or memory of the shape
// that the CPU's kernel gives for zeros.
void queue_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  size_t num = schema.arguments().size();
  std::vector<IValue> given(stack->end() - num, stack->end());
  at::Tensor first;
  auto find = [&](const at::Tensor& t) {
    if (t.defined() && t.device().type() == kType && !first.defined()) first = t;
    return t;
  };
  for (auto& value : given) each_tensor(value, find);
  TORCH_CHECK(first.defined(), schema.name(), ": no tensor of the simulated device");
  c10::OptionalDeviceGuard guard(first.device());
  auto device = first.device().index();

  auto of_zeros = [&] {
    torch::jit::Stack zeros;
    for (auto& value : given)
      zeros.push_back(each_tensor(value, [](const at::Tensor& t) {
        if (!t.defined()) return t;
        return at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kCPU)).zero_();
      }));
    auto kept = zeros;
    op.callBoxed(&zeros);
    return std::make_pair(kept, zeros);
  };
  bool resizes = false;
  for (size_t i = 0; i < num; i++)
    resizes |= schema.arguments()[i].is_out() && given[i].isTensor() && !given[i].toTensor().numel();
  if (resizes) {
    auto after = of_zeros().first;
    for (size_t i = 0; i < num; i++)
      if (schema.arguments()[i].is_out() && given[i].isTensor()) given[i].toTensor().resize_(after[i].toTensor().sizes());
  }

  std::vector<IValue> args;
  for (auto& value : given)
    args.push_back(each_tensor(value, [](const at::Tensor& t) { return !t.defined() ? t : t.device().is_cpu() ? t.clone() : raw(t); }));

  bool makes_tensors = false, makes_values = false;
  for (const auto& out : schema.returns()) {
    bool written = out.alias_info() && out.alias_info()->isWrite();
    TORCH_CHECK(!out.alias_info() || written, schema.name(), " makes a view; the simulated device lacks it");
    bool is_tensor = out.type()->isSubtypeOf(*c10::TensorType::get()) || out.type()->kind() == c10::TypeKind::ListType;
    makes_tensors |= is_tensor && !written;
    makes_values |= !is_tensor;
  }
  auto run = [op, args] {
    torch::jit::Stack inner(args);
    try {
      op.callBoxed(&inner);
    } catch (const std::exception& error) {
      TORCH_CHECK(false, op.operator_name(), ": ", error.what());
    }
    return inner;
  };
  std::vector<IValue> results;
  if (makes_values) {
    auto made = std::make_shared<torch::jit::Stack>();
    auto ticket = launch(device, [run, made] { *made = run(); });
    synchronize(current_queue(device), ticket);
    results = *made;
  } else if (makes_tensors) {
    std::vector<IValue> raws;
    for (auto& value : of_zeros().second) {
      results.push_back(each_tensor(value, [&](const at::Tensor& t) {
        return t.defined() ? empty_like(first, t.sizes(), t.strides(), t.scalar_type()) : t;
      }));
      raws.push_back(each_tensor(results.back(), [](const at::Tensor& t) { return t.defined() ? raw(t) : t; }));
    }
    launch(device, [run, raws] {
      auto made = run();
      for (size_t i = 0; i < made.size(); i++) {
        std::vector<at::Tensor> from, to;
        each_tensor(made[i], [&](const at::Tensor& t) { return from.push_back(t), t; });
        each_tensor(raws[i], [&](const at::Tensor& t) { return to.push_back(t), t; });
        for (size_t j = 0; j < to.size(); j++)
          if (to[j].defined()) to[j].copy_(from[j]);
      }
    });
  } else {
    launch(device, [run] { run(); });
    for (const auto& out : schema.returns())
      for (size_t i = 0; i < num; i++) {
        const auto* alias = schema.arguments()[i].alias_info();
        if (alias && alias->isWrite() && alias->beforeSets() == out.alias_info()->beforeSets()) results.push_back(given[i]);
      }
  }
  torch::jit::drop(*stack, num);
  for (auto& result : results) stack->push_back(std::move(result));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&queue_kernel>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", static_cast<at::Tensor (*)(const at::Tensor&, at::IntArrayRef)>(&at::native::view));
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("resize_", &resize);
  m.impl("_copy_from", &copy_from);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("record_stream", &record_stream);
}

// ---- what tests ask of it ----

int64_t hold_stream() {  // until `open_gate` of what this returns
  auto gate = std::make_shared<Gate>();
  gate->open = false;
  current_queue(current_device).push([gate] { gate->pass(); });
  Lock lock(mutex);
  gates.push_back(gate);
  return gates.size() - 1;
}

TORCH_LIBRARY(simulated, m) {
  m.def("init() -> ()", [] { at::globalContext().lazyInitDevice(kType); });
  m.def("counters() -> int[]", [] {
    Lock lock(mutex);
    return std::vector<int64_t>(counters, counters + NUM);
  });
  m.def("synchronizations() -> int[]", [] {  // pairs of a thread's id and a number
    Lock lock(mutex);
    std::vector<int64_t> out;
    for (auto& [thread, number] : synchronizations) out.insert(out.end(), {thread, number});
    return out;
  });
  m.def("devices_set() -> int[]", [] {  // pairs of a thread's id and a device
    Lock lock(mutex);
    std::vector<int64_t> out;
    for (auto& [thread, device] : devices_set) out.insert(out.end(), {thread, device});
    return out;
  });
  m.def("reset() -> ()", [] {  // all counters but those of memory
    Lock lock(mutex);
    for (int i = 0; i < NUM; i++)
      if (i != RESERVED && i != PINNED) counters[i] = 0;
    synchronizations.clear();
    devices_set.clear();
  });
  m.def("set_speed(int kernel_us, int link_bytes_per_s) -> ()", [](int64_t us, int64_t rate) {
    kernel_us = us;
    link_bytes_per_s = rate;
  });
  m.def("hold_stream() -> int", &hold_stream);
  m.def("hold_link() -> ()", [] {
    for (auto& of_device : queues)  // what was queued before is not held
      for (size_t id = 0; id < of_device.size(); id++) of_device[id].wait(of_device[id].last());
    gates[0]->set(false);
  });
  m.def("open_gate(int gate) -> bool", [](int64_t number) {  // whether it was still closed
    auto gate = gates.at(number);
    gate->set(true);
    return !std::exchange(gate->forced, false);
  });
  m.def("pin(int address, int size) -> ()", [](int64_t address, int64_t size) {
    use_device(current_device);
    Lock lock(mutex);
    pinned[(char*)address] = size;
    counters[PINNED] += size;
  });
  m.def("unpin(int address) -> ()", [](int64_t address) {
    use_device(current_device);
    Lock lock(mutex);
    counters[PINNED] -= pinned.at((char*)address);
    pinned.erase((char*)address);
  });
  m.def("current_device() -> int", [] { return int64_t(current_device); });
  m.def("set_device(int device) -> ()", [](int64_t device) { set_device(DeviceIndex(device)); });
  m.def("go_back(int device) -> ()", [](int64_t device) { current_device = DeviceIndex(device); });
  m.def("synchronize() -> ()", [] { Guard().synchronizeDevice(current_device); });
}

const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace sim
