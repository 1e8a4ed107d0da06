//! The stand-in driver for tests: built from the kernels' source, loaded under the name that cudarc asks for first.
//!
//! Work on streams runs only when something waits for it: call [`finish`] before results are read.

use cudarc::driver::{result, sys};
use evermoe::cuda::{self, Launcher};
use std::ffi::{CString, c_int};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::Command;
use std::ptr;

/// As `streams::Policy` of streams.h: how work on several streams is ordered; from `RANDOM` on, a seed.
pub(crate) const LATE: c_int = 0;
pub(crate) const EARLY: c_int = 1;
pub(crate) const RANDOM: c_int = 2;

/// The loaded driver.
pub(crate) struct Driver {
    set_policy: extern "C" fn(c_int),
    launches: extern "C" fn() -> usize,
}

impl Driver {
    /// Builds and loads it; `None` where that needs what is not there: kernels, g++ and make on x86-64.
    pub(crate) fn load() -> Option<Self> {
        let has = |program| Command::new(program).arg("--version").output().is_ok();
        if !cuda::has_kernels() || !has("g++") || !has("make") {
            return None;
        }
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulator");
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let mut make = Command::new("make");
        make.args(["--silent", "-j2", "-f"]).arg(root.join("tests/emulator/build.mk")).arg("DRIVER=1");
        make.arg(format!("OUT={}", folder.display()));
        assert!(make.status().expect("make").success());
        let path = CString::new(folder.join("libcuda.so").as_os_str().as_bytes()).expect("a path");
        // SAFETY: a library of ours; it stays loaded.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
        assert!(!handle.is_null(), "the fake driver does not load");
        // SAFETY: a name with its end.
        let set_policy = unsafe { libc::dlsym(handle, c"fake_driver_policy".as_ptr()) };
        // SAFETY: as above.
        let launches = unsafe { libc::dlsym(handle, c"fake_driver_launches".as_ptr()) };
        assert!(!set_policy.is_null() && !launches.is_null(), "the fake driver has no policies or no count");
        // SAFETY: the function's type in fake_driver.cpp.
        let set_policy =
            unsafe { std::mem::transmute::<*mut libc::c_void, extern "C" fn(c_int)>(set_policy) };
        // SAFETY: as above.
        let launches =
            unsafe { std::mem::transmute::<*mut libc::c_void, extern "C" fn() -> usize>(launches) };
        let driver = Self { set_policy, launches };
        driver.make_current(0);
        Some(driver)
    }

    /// Makes a device's context this thread's, for the calls of the test itself.
    pub(crate) fn make_current(&self, device: c_int) {
        // SAFETY: the driver is loaded; its contexts stay.
        unsafe {
            let context = result::primary_ctx::retain(device).expect("a context");
            result::ctx::set_current(context).expect("a context");
        }
    }

    /// How streams are ordered from now on.
    pub(crate) fn set_policy(&self, policy: c_int) {
        (self.set_policy)(policy);
    }

    /// How many kernels were put on streams so far.
    pub(crate) fn launches(&self) -> usize {
        (self.launches)()
    }

    /// A launcher on the default stream.
    pub(crate) fn launcher(&self) -> Launcher {
        self.launcher_on(ptr::null_mut())
    }

    /// A launcher on a stream.
    pub(crate) fn launcher_on(&self, stream: sys::CUstream) -> Launcher {
        // SAFETY: the default stream, or one of the test's that outlives the launcher.
        unsafe { Launcher::new(0, stream.cast()) }.expect("a launcher")
    }
}

/// Runs what was put on the default stream.
pub(crate) fn finish() {
    // SAFETY: the default stream.
    unsafe { result::stream::synchronize(ptr::null_mut()) }.expect("the work of the default stream");
}
