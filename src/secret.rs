//! The job's secret: tags by which members authenticate messages. Pure.

use crate::ensure;
use crate::error::{Error, Result};
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use std::fmt;

/// Size of a tag in bytes.
pub const TAG_BYTES: usize = 32;
/// Minimum number of characters: a shorter secret can be found from a tag by exhaustive search.
const MIN_CHARACTERS: usize = 16;

/// A secret that only the members of a job know. It is never printed.
#[derive(Clone)]
pub struct Secret(Hmac<Sha256>);

impl fmt::Debug for Secret {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Secret(…)")
    }
}

impl Secret {
    /// Creates a secret from its text.
    ///
    /// # Errors
    /// [`Error::Invalid`] if it has fewer than 16 characters.
    pub fn new(text: &str) -> Result<Self> {
        let characters = text.chars().count();
        ensure!(
            characters >= MIN_CHARACTERS,
            "EVERMOE_SECRET: expected {MIN_CHARACTERS} characters or more, got {characters}"
        );
        Hmac::new_from_slice(text.as_bytes())
            .map(Self)
            .map_err(|error| Error::Internal(format!("EVERMOE_SECRET: {error}")))
    }

    /// Returns the HMAC-SHA-256 of some parts for one purpose: tags of different purposes or parts differ.
    ///
    /// ```
    /// use evermoe::secret::Secret;
    /// let (secret, other) = (Secret::new("correct horse battery")?, Secret::new("another secret of a job")?);
    /// let tag = secret.tag("answer", &[b"ab", b"c"]);
    /// assert!(secret.is_tag(&tag, "answer", &[b"ab", b"c"]));
    /// assert!(!secret.is_tag(&tag, "answer", &[b"a", b"bc"]) && !secret.is_tag(&tag, "probe", &[b"ab", b"c"]));
    /// assert!(!other.is_tag(&tag, "answer", &[b"ab", b"c"]));
    /// # Ok::<(), evermoe::Error>(())
    /// ```
    #[must_use]
    pub fn tag(&self, purpose: &str, parts: &[&[u8]]) -> [u8; TAG_BYTES] {
        self.over(purpose, parts).finalize().into_bytes().into()
    }

    /// Returns whether `tag` is the tag of the parts, compared in constant time.
    #[must_use]
    pub fn is_tag(&self, tag: &[u8], purpose: &str, parts: &[&[u8]]) -> bool {
        self.over(purpose, parts).verify_slice(tag).is_ok()
    }

    fn over(&self, purpose: &str, parts: &[&[u8]]) -> Hmac<Sha256> {
        let mut tag = self.0.clone();
        for part in std::iter::once(&purpose.as_bytes()).chain(parts) {
            tag.update(&(part.len() as u64).to_le_bytes());
            tag.update(part);
        }
        tag
    }
}
