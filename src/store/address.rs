//! URLs of object stores: kind of service, bucket and path; never credentials.

use crate::ensure;
use crate::error::{Error, Result};
use std::fmt;
use url::Url;

/// Kind of a service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheme {
    /// `s3://BUCKET/PATH`
    S3,
    /// `gs://BUCKET/PATH`
    Gcs,
    /// `az://CONTAINER/PATH`, or `abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PATH`
    Azure,
    /// `https://HOST/PATH`, read-only.
    Http,
}

/// A checked URL of an object store.
#[derive(Clone, Debug)]
pub struct Address {
    /// Kind of the service.
    pub scheme: Scheme,
    pub(super) url: Url,
}

const EXPECTED: &str = "expected s3://BUCKET/PATH, gs://BUCKET/PATH, az://CONTAINER/PATH, https://HOST/PATH for reading, or a folder";

impl Address {
    /// Parses a URL.
    ///
    /// ```
    /// use evermoe::store::{Address, Scheme};
    /// assert_eq!(Address::parse("s3://bucket/run")?.scheme, Scheme::S3);
    /// assert!(Address::parse("ftp://host/run").is_err());
    /// # Ok::<(), evermoe::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] if it is malformed, has an unknown scheme, or contains credentials; the message never shows
    /// those.
    pub fn parse(text: &str) -> Result<Self> {
        let url = Url::parse(text)
            .map_err(|error| Error::invalid(format!("the URL is malformed: {error}; {EXPECTED}")))?;
        let scheme = match url.scheme() {
            "s3" | "s3a" => Scheme::S3,
            "gs" => Scheme::Gcs,
            "az" | "azure" | "adl" | "abfs" | "abfss" => Scheme::Azure,
            "http" | "https" => Scheme::Http,
            other => {
                return Err(Error::invalid(format!("the scheme {other}:// is unknown; {EXPECTED}")));
            }
        };
        let has_user = !url.username().is_empty() && scheme != Scheme::Azure;
        ensure!(
            !has_user && url.password().is_none() && url.query().is_none() && url.fragment().is_none(),
            "the {}:// URL has a user, a password, a query or a fragment: credentials come from the environment or the \
             machine's role, never from the URL",
            url.scheme()
        );
        ensure!(
            url.host_str().is_some_and(|host| !host.is_empty()),
            "the {}:// URL names no bucket or host; {EXPECTED}",
            url.scheme()
        );
        Ok(Self { scheme, url })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.url.as_str().trim_end_matches('/'))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_scheme_is_known() {
        for (text, scheme) in [
            ("s3://bucket", Scheme::S3),
            ("s3a://bucket/a/b", Scheme::S3),
            ("gs://bucket/run", Scheme::Gcs),
            ("az://container/run", Scheme::Azure),
            ("abfss://container@account.dfs.core.windows.net/run", Scheme::Azure),
            ("http://127.0.0.1:80/run", Scheme::Http),
            ("https://host/run", Scheme::Http),
        ] {
            assert_eq!(Address::parse(text).unwrap().scheme, scheme, "{text}");
        }
        assert_eq!(Address::parse("s3://bucket/run/").unwrap().to_string(), "s3://bucket/run");
    }

    #[test]
    fn what_is_no_place_is_refused_without_telling_its_credentials() {
        for (text, message) in [
            ("bucket/run", "is malformed"),
            ("ftp://host/run", "ftp:// is unknown"),
            ("s3:///run", "names no bucket"),
            ("s3://key:hidden@bucket/run", "has a user"),
            ("s3://hidden@bucket/run", "has a user"),
            ("az://container:hidden@account/run", "has a user"),
            ("https://host/run?sig=hidden", "a query"),
            ("s3://bucket/run#hidden", "a fragment"),
        ] {
            let found = Address::parse(text).unwrap_err().to_string();
            assert!(found.contains(message) && !found.contains("hidden"), "{text}: {found}");
        }
    }
}
