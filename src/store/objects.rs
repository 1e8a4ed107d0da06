//! An object store: objects under a prefix of a bucket, named relative to it.

use super::address::{Address, Scheme};
use super::pace::Pace;
use super::{credentials, problem, runtime};
use crate::ensure;
use crate::error::{Error, Result};
use futures_util::{StreamExt, TryStreamExt, stream};
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::http::HttpBuilder;
use object_store::path::Path;
use object_store::{
    BackoffConfig, ClientConfigKey, ClientOptions, ObjectStoreExt, PutMode, PutPayload, RetryConfig,
};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

/// Size of a part: larger objects are transferred in several parts at once.
pub const PART_BYTES: usize = 8 << 20;
/// Maximum number of parts in transfer per process; with their size it bounds the memory of all requests.
const MAX_PARTS: usize = 16;
const MAX_REQUEST: Duration = Duration::from_secs(60);
const MIN_REQUEST: Duration = Duration::from_secs(1);
/// More retries than fit into any patience.
const MAX_RETRIES: usize = 1_000_000;
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const MAX_PAUSE: Duration = Duration::from_secs(5);

static PARTS: Semaphore = Semaphore::const_new(MAX_PARTS);

/// Options of an object store.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Time for which a request is retried while the service does not answer, or reports that it is unavailable.
    pub patience: Duration,
    /// Maximum bytes per second that are written; `None` for no limit.
    pub upload_limit: Option<f64>,
    /// Maximum bytes per second that [`ObjectStore::read_into`] reads; `None` for no limit.
    pub download_limit: Option<f64>,
}

impl Options {
    fn check(&self) -> Result<()> {
        ensure!(self.patience > Duration::ZERO, "patience: expected more than 0 seconds, got 0");
        for (name, limit) in [("upload_limit", self.upload_limit), ("download_limit", self.download_limit)] {
            let limit = limit.unwrap_or(f64::MAX);
            ensure!(
                limit.is_finite() && limit >= 1.0,
                "{name}: expected 1 byte per second or more, got {limit}"
            );
        }
        Ok(())
    }
}

/// An entry in a list of objects.
#[derive(Clone, Debug, PartialEq)]
pub struct Stored {
    /// Name relative to the store's prefix.
    pub name: String,
    /// Size in bytes.
    pub nbytes: u64,
    /// Time of the last write by the service's clock, in seconds since 1970.
    pub modified: f64,
}

/// Objects under a URL. Every operation blocks until it is done, and is retried with back-off.
///
/// Names are paths relative to the URL, such as `step-00000120/manifest.json`.
#[derive(Debug)]
pub struct ObjectStore {
    store: Arc<dyn object_store::ObjectStore>,
    prefix: Path,
    shown: String,
    is_read_only: bool,
    options: Options,
    uploads: Pace,
    downloads: Pace,
    runtime: Handle,
    process: u32,
}

impl ObjectStore {
    /// Opens a store with the credentials of the provider's chain; sends no request yet.
    ///
    /// # Errors
    /// [`Error::Invalid`] for invalid options or variables. [`Error::Io`] with `EACCES` if there are no credentials.
    pub fn open(address: &Address, options: Options) -> Result<Self> {
        options.check()?;
        if let Some(advice) = credentials::missing(address.scheme, |name| std::env::var(name).ok()) {
            let text = format!("there are no credentials: {advice}");
            return Err(problem::failed(&address.to_string(), libc::EACCES, &text));
        }
        let path = Path::from_url_path(address.url.path())
            .map_err(|error| Error::invalid(format!("{address} has no valid path: {error}")))?;
        // Uses ring for TLS, unless another part of the process has installed another provider.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let store = build(address, &options).map_err(|error| {
            Error::invalid(format!("{address} cannot be opened: {}", problem::text_of(&error)))
        })?;
        Ok(Self {
            store,
            prefix: path,
            shown: address.to_string(),
            is_read_only: address.scheme == Scheme::Http,
            options,
            uploads: Pace::new(options.upload_limit),
            downloads: Pace::new(options.download_limit),
            runtime: runtime::handle()?,
            process: std::process::id(),
        })
    }

    /// Whether the store is read-only regardless of the credentials.
    pub fn is_read_only(&self) -> bool {
        self.is_read_only
    }

    /// Writes or replaces an object; in parts if it has more than [`PART_BYTES`].
    ///
    /// # Errors
    /// [`Error::Io`]: the object is missing or has its previous content.
    pub fn put(&self, name: &str, data: &[u8]) -> Result<()> {
        self.check_writable()?;
        let path = self.path(name)?;
        self.wait(name, async || {
            if data.len() <= PART_BYTES {
                let _part = PARTS.acquire().await;
                self.uploads.wait(data.len()).await;
                return self.store.put(&path, PutPayload::from(data.to_vec())).await.map(drop);
            }
            let mut upload = self.store.put_multipart(&path).await?;
            let mut parts = JoinSet::new();
            let mut sent = Ok(());
            for part in data.chunks(PART_BYTES) {
                let permit = PARTS.acquire().await;
                self.uploads.wait(part.len()).await;
                let part = upload.put_part(PutPayload::from(part.to_vec()));
                parts.spawn(async move {
                    let _permit = permit;
                    part.await
                });
                while let Some(done) = parts.try_join_next() {
                    sent = sent.and(done.map_err(object_store::Error::from).flatten());
                }
                if sent.is_err() {
                    break;
                }
            }
            while let Some(done) = parts.join_next().await {
                sent = sent.and(done.map_err(object_store::Error::from).flatten());
            }
            let sent = match sent {
                Ok(()) => upload.complete().await.map(drop),
                failed => failed,
            };
            if sent.is_err() {
                let _ = upload.abort().await; // the service, or its owner's lifecycle rules, remove the rest
            }
            sent
        })
    }

    /// Creates an object unless its name is taken. Returns whether the object of that name has these bytes now. If an
    /// answer is lost, the object is read and compared. So the bytes should be unique to the writer, or mean the same
    /// from any writer.
    ///
    /// # Errors
    /// [`Error::Io`]: the outcome is unknown.
    pub fn create(&self, name: &str, data: &[u8]) -> Result<bool> {
        self.check_writable()?;
        let path = self.path(name)?;
        let deadline = Instant::now() + self.options.patience;
        let mut pause = FIRST_PAUSE;
        self.wait(name, async || {
            loop {
                let payload = PutPayload::from(data.to_vec());
                let failed = match self.store.put_opts(&path, payload, PutMode::Create.into()).await {
                    Ok(_) => return Ok(true),
                    Err(error @ object_store::Error::AlreadyExists { .. }) => error,
                    Err(error) if problem::is_passing(&error) => error,
                    Err(error) => return Err(error),
                };
                if Instant::now() > deadline {
                    return Err(failed);
                }
                match self.read_all(&path).await {
                    Ok(found) => return Ok(found == data),
                    Err(object_store::Error::NotFound { .. }) => {}
                    Err(error) if problem::is_passing(&error) => {}
                    Err(error) => return Err(error),
                }
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(MAX_PAUSE);
            }
        })
    }

    async fn read_all(&self, path: &Path) -> object_store::Result<Vec<u8>> {
        Ok(self.store.get(path).await?.bytes().await?.to_vec())
    }

    /// Reads an object of at most `most_bytes`; returns `None` if there is none.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if it is larger. [`Error::Io`] if it cannot be read.
    pub fn read(&self, name: &str, most_bytes: u64) -> Result<Option<Vec<u8>>> {
        let path = self.path(name)?;
        let read = self.wait(name, async || {
            let found = match self.store.get(&path).await {
                Err(object_store::Error::NotFound { .. }) => return Ok(Some(None)),
                found => found?,
            };
            if found.meta.size > most_bytes {
                return Ok(None);
            }
            Ok(Some(Some(found.bytes().await?.to_vec())))
        })?;
        read.ok_or_else(|| {
            Error::corrupt(format!("expected at most {most_bytes} bytes"))
                .of_object(format!("{}/{name}", self.shown))
        })
    }

    /// Returns the size of an object in bytes, or `None` if there is none.
    ///
    /// # Errors
    /// [`Error::Io`] if the service does not report it.
    pub fn size(&self, name: &str) -> Result<Option<u64>> {
        let path = self.path(name)?;
        self.wait(name, async || match self.store.head(&path).await {
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            found => Ok(Some(found?.size)),
        })
    }

    /// Reads bytes from `start` into `out`, several parts at once.
    ///
    /// # Errors
    /// [`Error::Io`] if they cannot be read, or if the object has fewer.
    pub fn read_into(&self, name: &str, start: u64, out: &mut [u8]) -> Result<()> {
        let path = self.path(name)?;
        self.run(name, async {
            let parts = out.chunks_mut(PART_BYTES).zip((start..).step_by(PART_BYTES)).map(|(part, start)| {
                let path = &path;
                async move {
                    self.downloads.wait(part.len()).await; // which does not count as time of the requests
                    self.retried(async || self.read_part(path, start, part).await).await
                }
            });
            stream::iter(parts).buffer_unordered(MAX_PARTS).try_collect::<()>().await
        })
    }

    async fn read_part(&self, path: &Path, start: u64, part: &mut [u8]) -> object_store::Result<()> {
        let _permit = PARTS.acquire().await;
        let found = self.store.get_range(path, start..start + part.len() as u64).await?;
        if found.len() != part.len() {
            let (expected, found) = (part.len(), found.len());
            let source = format!("expected {expected} bytes from {start} on, got {found}").into();
            return Err(object_store::Error::Generic { store: problem::RANGE, source });
        }
        part.copy_from_slice(&found);
        Ok(())
    }

    /// Lists the objects below a name; all objects for an empty name.
    ///
    /// # Errors
    /// [`Error::Io`] if they cannot be listed.
    pub fn list(&self, below: &str) -> Result<Vec<Stored>> {
        let path = self.path(below)?;
        let found = self.wait(below, async || self.store.list(Some(&path)).try_collect::<Vec<_>>().await)?;
        let stored = found.into_iter().filter_map(|meta| {
            let modified = meta.last_modified.timestamp_millis() as f64 / 1e3;
            Some(Stored { name: self.name(&meta.location)?, nbytes: meta.size, modified })
        });
        Ok(stored.collect())
    }

    /// Lists the names directly below the prefix: of objects, and of the first component of longer names.
    ///
    /// # Errors
    /// [`Error::Io`] if they cannot be listed.
    pub fn names(&self) -> Result<Vec<String>> {
        let found = self.wait("", async || self.store.list_with_delimiter(Some(&self.prefix)).await)?;
        let objects = found.objects.into_iter().map(|meta| meta.location);
        Ok(found.common_prefixes.into_iter().chain(objects).filter_map(|path| self.name(&path)).collect())
    }

    /// Removes objects; missing ones are no error.
    ///
    /// # Errors
    /// [`Error::Io`]: some may remain.
    pub fn remove(&self, names: &[String]) -> Result<()> {
        self.check_writable()?;
        let paths = names.iter().map(|name| self.path(name)).collect::<Result<Vec<_>>>()?;
        self.wait("", async || {
            let paths = stream::iter(paths.clone().into_iter().map(Ok)).boxed();
            let mut gone = self.store.delete_stream(paths);
            while let Some(done) = gone.next().await {
                match done {
                    Ok(_) | Err(object_store::Error::NotFound { .. }) => {}
                    Err(error) => return Err(error),
                }
            }
            Ok(())
        })
    }

    fn check_writable(&self) -> Result<()> {
        if self.is_read_only {
            let text = "a store behind HTTP is read-only: write to s3://, gs://, az:// or a folder";
            return Err(problem::failed(&self.shown, libc::EROFS, text));
        }
        Ok(())
    }

    fn path(&self, name: &str) -> Result<Path> {
        let path = if name.is_empty() { self.prefix.to_string() } else { format!("{}/{name}", self.prefix) };
        Path::parse(path.trim_start_matches('/'))
            .map_err(|error| Error::invalid(format!("{name:?} is not a valid object name: {error}")))
    }

    fn name(&self, path: &Path) -> Option<String> {
        let below: Vec<String> =
            path.prefix_match(&self.prefix)?.map(|part| part.as_ref().to_owned()).collect();
        (!below.is_empty()).then(|| below.join("/"))
    }

    /// Runs an operation with retries and blocks until it is done.
    fn wait<T>(&self, name: &str, operation: impl AsyncFnMut() -> object_store::Result<T>) -> Result<T> {
        self.run(name, self.retried(operation))
    }

    /// Runs an operation. Repeats it for failures of the service that requests do not retry by themselves, such as a
    /// connection that ends between two requests.
    async fn retried<T>(
        &self,
        mut operation: impl AsyncFnMut() -> object_store::Result<T>,
    ) -> object_store::Result<T> {
        let deadline = Instant::now() + self.options.patience;
        let mut pause = FIRST_PAUSE;
        loop {
            match operation().await {
                Err(error) if problem::is_passing(&error) && Instant::now() + pause < deadline => {
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(MAX_PAUSE);
                }
                done => return done,
            }
        }
    }

    /// Blocks until the work on an object is done.
    fn run<T>(&self, name: &str, work: impl Future<Output = object_store::Result<T>>) -> Result<T> {
        if self.process != std::process::id() {
            return Err(Error::Internal(format!(
                "{} was opened by the process that forked this one",
                self.shown
            )));
        }
        let what = if name.is_empty() { self.shown.clone() } else { format!("{}/{name}", self.shown) };
        self.runtime.block_on(work).map_err(|error| problem::problem(&what, &error))
    }
}

fn build(address: &Address, options: &Options) -> object_store::Result<Arc<dyn object_store::ObjectStore>> {
    let backoff = BackoffConfig { init_backoff: FIRST_PAUSE, max_backoff: MAX_PAUSE, base: 2.0 };
    let retry = RetryConfig { backoff, max_retries: MAX_RETRIES, retry_timeout: options.patience };
    let request = options.patience.clamp(MIN_REQUEST, MAX_REQUEST);
    let (key, value) = (ClientConfigKey::Timeout, format!("{} s", request.as_secs_f64().ceil()));
    let url = address.url.as_str();
    Ok(match address.scheme {
        Scheme::S3 => Arc::new(
            AmazonS3Builder::from_env()
                .with_url(url)
                .with_config(AmazonS3ConfigKey::Client(key), value)
                .with_retry(retry)
                .build()?,
        ),
        Scheme::Gcs => Arc::new(
            GoogleCloudStorageBuilder::from_env()
                .with_url(url)
                .with_config(GoogleConfigKey::Client(key), value)
                .with_retry(retry)
                .build()?,
        ),
        Scheme::Azure => Arc::new(
            MicrosoftAzureBuilder::from_env()
                .with_url(url)
                .with_config(AzureConfigKey::Client(key), value)
                .with_retry(retry)
                .build()?,
        ),
        Scheme::Http => Arc::new(
            HttpBuilder::new()
                .with_url(&address.url[..url::Position::BeforePath])
                .with_client_options(ClientOptions::new().with_allow_http(true).with_timeout(request))
                .with_retry(retry)
                .build()?,
        ),
    })
}
