//! Kernels: Rust functions of tensors and numbers behind the C entry point that torch's dispatcher calls.
//!
//! A kernel owns its inputs and gives away its outputs. An error or a panic becomes `c10::Error`, which Python sees as
//! `RuntimeError` with the message.

use super::ffi::{ListHandle, StableValue, TensorHandle, symbols};
use super::tensor::Tensor;
use crate::ensure;
use crate::error::Result;
use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CString, c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// An argument of a kernel.
pub(super) trait Argument: Sized {
    /// Takes the value, with everything that it owns.
    ///
    /// # Safety
    /// The value must be of the schema's type for `Self`, and be taken once.
    unsafe fn take(value: StableValue) -> Self;
}

impl Argument for Tensor {
    unsafe fn take(value: StableValue) -> Self {
        // SAFETY: a `Tensor` argument is an owned handle.
        unsafe { Self::from_raw(value as TensorHandle) }
    }
}

impl Argument for i64 {
    unsafe fn take(value: StableValue) -> Self {
        value as Self
    }
}

impl Argument for bool {
    unsafe fn take(value: StableValue) -> Self {
        value as u8 != 0
    }
}

/// `T?` in a schema: null, or a box on C++'s heap that holds the value.
impl<T: Argument> Argument for Option<T> {
    unsafe fn take(value: StableValue) -> Self {
        if value == 0 {
            return None;
        }
        let boxed = value as *mut StableValue;
        // SAFETY: an owned box with one value, freed after it is read, with torch's function for it.
        unsafe {
            let inner = *boxed;
            match symbols().torch_delete_stable_ivalue {
                Some(delete) => drop(delete(boxed)),
                None => (symbols().operator_delete)(boxed.cast::<c_void>()),
            }
            Some(T::take(inner))
        }
    }
}

/// `T[]` in a schema: an owned list, whose items are owned too.
impl<T: Argument> Argument for Vec<T> {
    unsafe fn take(value: StableValue) -> Self {
        let list = value as ListHandle;
        // SAFETY: an owned list, deleted after each of its items is taken once; these calls cannot fail for one.
        unsafe {
            let mut len = 0;
            (symbols().torch_list_size)(list, &mut len);
            let item = |index| {
                let mut item = 0;
                (symbols().torch_list_get_item)(list, index, &mut item);
                T::take(item)
            };
            let items = (0..len).map(item).collect();
            (symbols().torch_delete_list)(list);
            items
        }
    }
}

/// Results of a kernel: nothing, one tensor or two.
pub(super) trait Outputs {
    /// Number of values that the schema returns.
    const COUNT: u64;

    /// Gives the values to torch.
    ///
    /// # Safety
    /// The stack must have room for [`Outputs::COUNT`] values.
    unsafe fn give(self, stack: *mut StableValue);
}

impl Outputs for () {
    const COUNT: u64 = 0;

    unsafe fn give(self, _stack: *mut StableValue) {}
}

impl Outputs for Tensor {
    const COUNT: u64 = 1;

    unsafe fn give(self, stack: *mut StableValue) {
        // SAFETY: room for one value.
        unsafe { stack.write(self.into_raw() as StableValue) };
    }
}

impl Outputs for (Tensor, Tensor) {
    const COUNT: u64 = 2;

    unsafe fn give(self, stack: *mut StableValue) {
        // SAFETY: room for two values.
        unsafe {
            stack.write(self.0.into_raw() as StableValue);
            stack.add(1).write(self.1.into_raw() as StableValue);
        }
    }
}

/// A Rust function that can be a kernel.
pub(super) trait Kernel<Arguments>: Copy + 'static {
    /// Takes the arguments from the stack, runs, and puts the results on the stack.
    ///
    /// # Safety
    /// The stack must be that of a call of a kernel with the registered schema.
    unsafe fn call(self, stack: *mut StableValue, num_inputs: u64, num_outputs: u64) -> Result<()>;
}

macro_rules! kernel {
    ($count:literal: $($name:ident $index:literal),*) => {
        impl<F, R, $($name),*> Kernel<($($name,)* R,)> for F
        where
            F: Fn($($name),*) -> Result<R> + Copy + 'static,
            R: Outputs,
            $($name: Argument),*
        {
            #[allow(non_snake_case)]
            unsafe fn call(self, stack: *mut StableValue, num_inputs: u64, num_outputs: u64) -> Result<()> {
                ensure!(
                    num_inputs == $count && num_outputs == R::COUNT,
                    "the schema and the kernel of an evermoe op differ: {num_inputs} inputs and {num_outputs} outputs \
                     against {} and {}", $count, R::COUNT
                );
                // Every input is owned before the kernel runs, so nothing leaks when it fails.
                // SAFETY: the counts agree; `register` pairs the kernel with a schema of these types.
                $(let $name = unsafe { $name::take(*stack.add($index)) };)*
                let outputs = self($($name),*)?;
                // SAFETY: the same number of outputs as in the schema.
                unsafe { outputs.give(stack) };
                Ok(())
            }
        }
    };
}
kernel!(1: A 0);
kernel!(2: A 0, B 1);
kernel!(3: A 0, B 1, C 2);
kernel!(4: A 0, B 1, C 2, D 3);
kernel!(5: A 0, B 1, C 2, D 3, E 4);
kernel!(6: A 0, B 1, C 2, D 3, E 4, G 5);
kernel!(7: A 0, B 1, C 2, D 3, E 4, G 5, H 6);

thread_local! {
    /// The message of this thread's last failure; torch copies it when it throws.
    static MESSAGE: RefCell<CString> = RefCell::default();
}

/// The entry point that torch calls.
///
/// The C++ exception passes through this frame, so it owns nothing, and [`run`] is a separate call: without a landing
/// pad in this frame, the unwinder needs nothing of Rust's.
///
/// # Safety
/// As [`Kernel::call`].
pub(super) unsafe extern "C-unwind" fn entry<F: Kernel<A>, A>(
    stack: *mut StableValue,
    inputs: u64,
    outputs: u64,
) {
    // SAFETY: torch's arguments are passed on.
    let message = unsafe { run::<F, A>(stack, inputs, outputs) };
    if !message.is_null() {
        // SAFETY: C strings; throws, and this frame has nothing to drop.
        unsafe { (symbols().aoti_torch_check)(false, c"kernel".as_ptr(), c"evermoe".as_ptr(), 0, message) };
    }
}

/// Returns null on success, or else the message.
#[inline(never)]
unsafe extern "C" fn run<F: Kernel<A>, A>(
    stack: *mut StableValue,
    inputs: u64,
    outputs: u64,
) -> *const c_char {
    const { assert!(size_of::<F>() == 0, "a kernel is a plain function, without captures") };
    // SAFETY: a value of a zero-sized type, whose only instance was given to `register`.
    let kernel: F = unsafe { std::mem::transmute_copy(&()) };
    // SAFETY: torch's arguments are passed on.
    let text = match catch_unwind(AssertUnwindSafe(|| unsafe { kernel.call(stack, inputs, outputs) })) {
        Ok(Ok(())) => return std::ptr::null(),
        Ok(Err(error)) => error.to_string(),
        Err(panic) => format!("a bug in evermoe (panic in a kernel): {}", panic_text(&*panic)),
    };
    let text = CString::new(text.replace('\0', "\\0")).unwrap_or_default();
    MESSAGE.with(|message| {
        *message.borrow_mut() = text;
        message.borrow().as_ptr()
    })
}

fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}
