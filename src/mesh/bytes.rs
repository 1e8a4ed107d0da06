//! Addresses of messages.

/// Memory of a message.
#[derive(Clone, Copy, Debug)]
pub struct Bytes {
    /// Its first byte; anything for a length of 0.
    pub address: *mut u8,
    /// Number of bytes.
    pub length: usize,
}

// SAFETY: it is only an address; each use states why it is allowed.
unsafe impl Send for Bytes {}
// SAFETY: as above.
unsafe impl Sync for Bytes {}

impl Bytes {
    pub(super) fn skip(self, n: usize) -> Self {
        Self { address: self.address.wrapping_add(n), length: self.length - n }
    }

    pub(super) fn first(self, n: usize) -> Self {
        Self { length: n, ..self }
    }

    /// # Safety
    /// The memory is valid, and nothing else writes it meanwhile.
    pub(super) unsafe fn as_slice<'a>(self) -> &'a [u8] {
        if self.length == 0 {
            return &[];
        }
        // SAFETY: as required above.
        unsafe { std::slice::from_raw_parts(self.address, self.length) }
    }

    /// # Safety
    /// The memory is valid, and nothing else uses it meanwhile.
    pub(super) unsafe fn as_mut_slice<'a>(self) -> &'a mut [u8] {
        if self.length == 0 {
            return &mut [];
        }
        // SAFETY: as required above.
        unsafe { std::slice::from_raw_parts_mut(self.address, self.length) }
    }
}
