//! An owned tensor handle with the properties that ops need.

use super::ffi::{StableValue, TensorHandle, check, symbols};
use crate::cpu::{Buffer, Buffers, MIN_BYTES};
use crate::ensure;
use crate::error::Result;
use half::{bf16, f16};
use std::ffi::{CStr, c_void};
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// The version of torch whose ABI the kernels use: 2.10.
pub(super) const ABI_VERSION: u64 = 2 << 56 | 10 << 48;
/// Maximum dimensions that [`Tensor::empty`] and [`Tensor::bump_version`] handle.
const MAX_DIM: usize = 16;

/// Element types that the ops support.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Dtype {
    Uint8,
    Int32,
    Int64,
    Float32,
    Bfloat16,
    Float16,
    /// Any other type, by torch's number.
    Other(i32),
}

impl Dtype {
    fn from_code(code: i32) -> Self {
        let known = [Self::Uint8, Self::Int32, Self::Int64, Self::Float32, Self::Bfloat16, Self::Float16];
        known.into_iter().find(|dtype| dtype.code() == code).unwrap_or(Self::Other(code))
    }

    fn code(self) -> i32 {
        let symbols = symbols();
        // SAFETY: functions without arguments that return a constant.
        unsafe {
            match self {
                Self::Uint8 => (symbols.aoti_torch_dtype_uint8)(),
                Self::Int32 => (symbols.aoti_torch_dtype_int32)(),
                Self::Int64 => (symbols.aoti_torch_dtype_int64)(),
                Self::Float32 => (symbols.aoti_torch_dtype_float32)(),
                Self::Bfloat16 => (symbols.aoti_torch_dtype_bfloat16)(),
                Self::Float16 => (symbols.aoti_torch_dtype_float16)(),
                Self::Other(code) => code,
            }
        }
    }

    /// Bytes of one element.
    pub(super) fn bytes(self) -> usize {
        match self {
            Self::Uint8 => 1,
            Self::Bfloat16 | Self::Float16 => 2,
            Self::Int32 | Self::Float32 => 4,
            Self::Int64 => 8,
            // SAFETY: torch has returned this number for a type.
            Self::Other(code) => unsafe { (symbols().aoti_torch_dtype_element_size)(code) },
        }
    }
}

impl std::fmt::Display for Dtype {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let name = match self {
            Self::Uint8 => "uint8",
            Self::Int32 => "int32",
            Self::Int64 => "int64",
            Self::Float32 => "float32",
            Self::Bfloat16 => "bfloat16",
            Self::Float16 => "float16",
            Self::Other(1) => "int8",
            Self::Other(2) => "int16",
            Self::Other(7) => "float64",
            Self::Other(11) => "bool",
            Self::Other(code) => return write!(f, "dtype number {code}"),
        };
        f.write_str(name)
    }
}

/// A Rust type with a torch dtype.
pub(super) trait Element: Copy + 'static {
    const DTYPE: Dtype;
}

impl Element for u8 {
    const DTYPE: Dtype = Dtype::Uint8;
}
impl Element for i32 {
    const DTYPE: Dtype = Dtype::Int32;
}
impl Element for i64 {
    const DTYPE: Dtype = Dtype::Int64;
}
impl Element for f32 {
    const DTYPE: Dtype = Dtype::Float32;
}
impl Element for bf16 {
    const DTYPE: Dtype = Dtype::Bfloat16;
}
impl Element for f16 {
    const DTYPE: Dtype = Dtype::Float16;
}

/// Device of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Device {
    Cpu,
    Cuda(i32),
    Other(i32),
}

impl std::fmt::Display for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(index) => write!(f, "cuda:{index}"),
            Self::Other(number) => write!(f, "device type number {number}"),
        }
    }
}

/// Memory of large results on the host.
pub(super) static BUFFERS: Buffers = Buffers::new();

/// Called by torch on any thread, when the last tensor that uses the memory is gone.
unsafe extern "C" fn give_back(start: *mut c_void, capacity: *mut c_void) {
    if let Some(start) = NonNull::new(start.cast()) {
        // SAFETY: the parts that `empty_in_buffer` gave to torch, which returns them once.
        BUFFERS.give_back(unsafe { Buffer::from_raw(start, capacity.addr()) });
    }
}

/// An owned reference to a tensor.
pub(super) struct Tensor(TensorHandle);

impl Drop for Tensor {
    fn drop(&mut self) {
        // SAFETY: this value owns the handle.
        unsafe { (symbols().aoti_torch_delete_tensor_object)(self.0) };
    }
}

macro_rules! property {
    ($visibility:vis $name:ident, $function:ident, $type:ty) => {
        $visibility fn $name(&self) -> $type {
            let mut value = <$type>::default();
            // SAFETY: a live tensor, and a pointer to the result; the call cannot fail for one.
            unsafe { (symbols().$function)(self.0, &mut value) };
            value
        }
    };
}

impl Tensor {
    property!(dtype_code, aoti_torch_get_dtype, i32);
    property!(dim, aoti_torch_get_dim, i64);
    property!(numel_i64, aoti_torch_get_numel, i64);
    property!(device_type, aoti_torch_get_device_type, i32);
    property!(device_index, aoti_torch_get_device_index, i32);
    property!(pub(super) is_contiguous, aoti_torch_is_contiguous, bool);

    /// Takes ownership of a handle.
    ///
    /// # Safety
    /// The handle must be live, and no other code may delete it.
    pub(super) unsafe fn from_raw(handle: TensorHandle) -> Self {
        Self(handle)
    }

    /// Gives ownership away.
    pub(super) fn into_raw(self) -> TensorHandle {
        std::mem::ManuallyDrop::new(self).0
    }

    pub(super) fn dtype(&self) -> Dtype {
        Dtype::from_code(self.dtype_code())
    }

    pub(super) fn numel(&self) -> usize {
        self.numel_i64() as usize
    }

    pub(super) fn device(&self) -> Device {
        let number = self.device_type();
        // SAFETY: functions without arguments that return a constant.
        let (cpu, cuda) =
            unsafe { ((symbols().aoti_torch_device_type_cpu)(), (symbols().aoti_torch_device_type_cuda)()) };
        match number {
            number if number == cpu => Device::Cpu,
            number if number == cuda => Device::Cuda(self.device_index()),
            number => Device::Other(number),
        }
    }

    pub(super) fn sizes(&self) -> &[i64] {
        let dim = self.dim() as usize;
        let mut sizes = std::ptr::null();
        // SAFETY: a live tensor, and a pointer to the result.
        unsafe { (symbols().aoti_torch_get_sizes)(self.0, &mut sizes) };
        // SAFETY: `dim` sizes that live as long as the tensor; ops do not resize it.
        if dim == 0 { &[] } else { unsafe { std::slice::from_raw_parts(sizes, dim) } }
    }

    /// Address of the first element on the tensor's device, including the offset into the storage.
    pub(super) fn address(&self) -> *mut c_void {
        let mut address = std::ptr::null_mut();
        // SAFETY: a live tensor, and a pointer to the result.
        unsafe { (symbols().aoti_torch_get_data_ptr)(self.0, &mut address) };
        address
    }

    /// Returns the tensor itself if contiguous, or else a contiguous copy.
    pub(super) fn contiguous(self) -> Result<Self> {
        if self.is_contiguous() {
            return Ok(self);
        }
        const CONTIGUOUS_FORMAT: StableValue = 0;
        let mut stack = [self.into_raw() as StableValue, CONTIGUOUS_FORMAT];
        call(c"aten::contiguous", &mut stack)?;
        // SAFETY: the call consumed its argument and left an owned tensor.
        Ok(unsafe { Self::from_raw(stack[0] as TensorHandle) })
    }

    /// Creates an uninitialised contiguous tensor on the device of `like`.
    pub(super) fn empty(sizes: &[i64], dtype: Dtype, like: &Self) -> Result<Self> {
        ensure!(sizes.len() <= MAX_DIM, "expected at most {MAX_DIM} dimensions, got {}", sizes.len());
        let mut strides = [1_i64; MAX_DIM];
        for dim in (1..sizes.len()).rev() {
            strides[dim - 1] = strides[dim] * sizes[dim].max(1);
        }
        if like.device() == Device::Cpu
            && let Some(tensor) = Self::empty_in_buffer(sizes, &strides[..sizes.len()], dtype)
        {
            return Ok(tensor);
        }
        let mut handle = std::ptr::null_mut();
        // SAFETY: the first argument is the number of sizes and strides; a pointer to the handle.
        let status = unsafe {
            (symbols().aoti_torch_empty_strided)(
                sizes.len() as i64,
                sizes.as_ptr(),
                strides.as_ptr(),
                dtype.code(),
                like.device_type(),
                like.device_index(),
                &mut handle,
            )
        };
        check(status, "torch.empty")?;
        Ok(Self(handle))
    }

    /// Creates a large host tensor in reused memory; none for a small one, and before torch 2.11.
    fn empty_in_buffer(sizes: &[i64], strides: &[i64], dtype: Dtype) -> Option<Self> {
        static REFUSED: AtomicBool = AtomicBool::new(false);
        let from_blob = symbols().torch_from_blob.filter(|_| !REFUSED.load(Relaxed))?;
        let bytes = sizes.iter().try_fold(dtype.bytes(), |bytes, &size| bytes.checked_mul(size as usize))?;
        let buffer = (bytes >= MIN_BYTES).then(|| BUFFERS.take(bytes))??;
        const STRIDED: i32 = 0;
        const CPU_INDEX: i32 = -1;
        let (start, capacity) = buffer.into_raw();
        let mut handle = std::ptr::null_mut();
        // SAFETY: sizes and strides of the same length that stay inside the buffer, a pointer to the handle, and a
        // deleter whose context is the capacity.
        let status = unsafe {
            from_blob(
                start.as_ptr().cast(),
                sizes.len() as i64,
                sizes.as_ptr(),
                strides.as_ptr(),
                0,
                dtype.code(),
                (symbols().aoti_torch_device_type_cpu)(),
                CPU_INDEX,
                &mut handle,
                STRIDED,
                std::ptr::null(),
                0,
                give_back,
                std::ptr::without_provenance_mut(capacity),
            )
        };
        // The owner of the buffer after a failure is not documented: it is leaked once rather than freed twice.
        REFUSED.store(status != 0, Relaxed);
        (status == 0).then_some(Self(handle))
    }

    /// Sets every element to zero.
    fn zero(&mut self) -> Result<()> {
        // SAFETY: a live tensor.
        check(unsafe { (symbols().aoti_torch_zero_)(self.0) }, "torch.zero_")
    }

    /// Returns the elements of a contiguous CPU tensor. They must not be written meanwhile, as with every torch op.
    pub(super) fn slice<T: Element>(&self) -> Result<&[T]> {
        let start = self.host_address::<T>()?;
        // SAFETY: contiguous, on the host, of this type (checked), not null, alive as long as the tensor.
        Ok(unsafe { std::slice::from_raw_parts(start, self.numel()) })
    }

    /// Returns the elements for writing. `out` arguments are checked not to overlap the inputs.
    pub(super) fn slice_mut<T: Element>(&mut self) -> Result<&mut [T]> {
        let start = self.host_address::<T>()?;
        // SAFETY: as above; the op accesses the elements only through this value.
        Ok(unsafe { std::slice::from_raw_parts_mut(start, self.numel()) })
    }

    /// Returns the bytes of a contiguous CPU tensor of any type; as [`Tensor::slice`].
    pub(super) fn bytes(&self) -> Result<&[u8]> {
        let start = self.host_bytes()?;
        // SAFETY: contiguous, on the host (checked), not null, alive as long as the tensor; every byte is a u8.
        Ok(unsafe { std::slice::from_raw_parts(start, self.num_bytes()) })
    }

    /// Returns the bytes for writing; as [`Tensor::slice_mut`].
    pub(super) fn bytes_mut(&mut self) -> Result<&mut [u8]> {
        let start = self.host_bytes()?;
        // SAFETY: as above; the op accesses the bytes only through this value.
        Ok(unsafe { std::slice::from_raw_parts_mut(start, self.num_bytes()) })
    }

    fn host_address<T: Element>(&self) -> Result<*mut T> {
        ensure!(self.dtype() == T::DTYPE, "expected {}, got {}", T::DTYPE, self.dtype());
        self.host_bytes().map(|start| start.cast())
    }

    fn host_bytes(&self) -> Result<*mut u8> {
        ensure!(self.device() == Device::Cpu, "expected a CPU tensor, got one on {}", self.device());
        ensure!(self.is_contiguous(), "expected a contiguous tensor");
        self.check_memory()?;
        // Torch returns null if there are no elements, but slices need an address. One alignment is enough for every
        // type.
        let none = NonNull::<u128>::dangling().cast();
        Ok(NonNull::new(self.address().cast()).unwrap_or(none).as_ptr())
    }

    /// Refuses elements without memory, such as after `untyped_storage().resize_(0)` in sharded trainers.
    pub(super) fn check_memory(&self) -> Result<()> {
        ensure!(
            self.numel() == 0 || !self.address().is_null(),
            "expected tensors with memory, got one of shape {:?} whose storage was freed; fill it again first",
            self.sizes()
        );
        Ok(())
    }

    /// Size of the elements in bytes.
    pub(super) fn num_bytes(&self) -> usize {
        self.numel() * self.dtype().bytes()
    }

    /// The range of addresses of a contiguous tensor.
    pub(super) fn address_range(&self) -> Range<usize> {
        let start = self.address() as usize;
        start..start + self.num_bytes()
    }

    /// Informs autograd that the elements change; the dispatcher does not do so for ops registered through C.
    ///
    /// An in-place no-op on an empty view does it, because views share the counter.
    pub(super) fn bump_version(&self) -> Result<()> {
        let dim = self.dim() as usize;
        ensure!(dim <= MAX_DIM, "out: expected at most {MAX_DIM} dimensions, got {dim}");
        let _no_grad = NoGrad::new();
        if dim == 0 {
            return self.with_a_dimension()?.bump_version();
        }
        let (sizes, strides) = ([0_i64; MAX_DIM], [1_i64; MAX_DIM]);
        let mut view = std::ptr::null_mut();
        // SAFETY: as_strided reads one size and stride per dimension of the tensor.
        let status =
            unsafe { (symbols().aoti_torch_as_strided)(self.0, sizes.as_ptr(), strides.as_ptr(), &mut view) };
        check(status, "torch.as_strided")?;
        Self(view).zero()
    }

    /// Returns a view of shape `[1]` of a tensor without dimensions.
    fn with_a_dimension(&self) -> Result<Self> {
        let (mut again, strides) = (std::ptr::null_mut(), std::ptr::null());
        // SAFETY: the tensor has no dimensions, so no sizes and strides are read.
        let status = unsafe { (symbols().aoti_torch_as_strided)(self.0, strides, strides, &mut again) };
        check(status, "torch.as_strided")?;
        const FIRST: StableValue = 0;
        let mut stack = [again as StableValue, FIRST];
        call(c"aten::unsqueeze", &mut stack)?;
        // SAFETY: the call consumed its argument and left an owned tensor.
        Ok(unsafe { Self::from_raw(stack[0] as TensorHandle) })
    }
}

/// Disables grad mode on this thread until dropped.
struct NoGrad(bool);

impl NoGrad {
    fn new() -> Self {
        // SAFETY: reads and sets a thread-local flag.
        unsafe {
            let before = (symbols().aoti_torch_grad_mode_is_enabled)();
            (symbols().aoti_torch_grad_mode_set_enabled)(false);
            Self(before)
        }
    }
}

impl Drop for NoGrad {
    fn drop(&mut self) {
        // SAFETY: sets a thread-local flag.
        unsafe { (symbols().aoti_torch_grad_mode_set_enabled)(self.0) };
    }
}

/// Calls an ATen op; `stack` holds its arguments, then its results.
fn call(name: &CStr, stack: &mut [StableValue]) -> Result<()> {
    // SAFETY: the caller's stack fits the op's schema, and the name has no overload.
    let status = unsafe {
        (symbols().torch_call_dispatcher)(name.as_ptr(), c"".as_ptr(), stack.as_mut_ptr(), ABI_VERSION)
    };
    check(status, &name.to_string_lossy())
}
