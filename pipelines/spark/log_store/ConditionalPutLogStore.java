package io.mongomedallion.storage;

import io.delta.storage.HadoopFileSystemLogStore;
import java.io.ByteArrayOutputStream;
import java.io.DataInputStream;
import java.io.FileNotFoundException;
import java.io.IOException;
import java.io.InterruptedIOException;
import java.io.UncheckedIOException;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import java.util.Iterator;
import java.util.NoSuchElementException;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.FSDataOutputStream;
import org.apache.hadoop.fs.FileStatus;
import org.apache.hadoop.fs.FileSystem;
import org.apache.hadoop.fs.Path;
import org.apache.hadoop.fs.RemoteIterator;

/**
 * Delta's log on S3 with a compare-and-set: a commit is one PUT with {@code If-None-Match: *}, so that of two drivers
 * that write one version the store lets one win. Needs hadoop-aws 3.4.2 or later; a file system that does not know the
 * option refuses it, and nothing is written.
 */
public final class ConditionalPutLogStore extends HadoopFileSystemLogStore {
    private static final String S3A = "org.apache.hadoop.fs.s3a.S3AFileSystem";
    private static final String CONDITIONAL = "fs.option.create.conditional.overwrite";
    /** How often a PUT is repeated that met another one; the last pause takes 6.4 s. */
    private static final int REPEATED = 7;
    private static final ThreadLocal<Commit> WRITTEN = new ThreadLocal<>();

    private record Commit(Path path, byte[] content) {}

    public ConditionalPutLogStore(Configuration hadoopConf) {
        super(hadoopConf);
    }

    @Override
    public void write(Path path, Iterator<String> actions, Boolean overwrite, Configuration hadoopConf) throws IOException {
        byte[] content = lines(actions);
        FileSystem fileSystem = path.getFileSystem(hadoopConf);
        try {
            decided(fileSystem, path, content, overwrite);
        } catch (IOException error) {
            if (overwrite || !isThere(error)) {
                throw error;
            }
            // A PUT that the client repeats, because its answer was lost, meets what the first one wrote.
            if (!holds(fileSystem, path, content)) {
                throw new java.nio.file.FileAlreadyExistsException(path.toString());
            }
        }
        if (!overwrite) {
            WRITTEN.set(new Commit(path, content));
        }
    }

    /**
     * The content of a commit, given by its URL, if it is the last one that the calling thread has made; else null. For the copy that its
     * writer keeps, which needs no request then. It is kept for one call.
     */
    public static byte[] written(String url) {
        Commit commit = WRITTEN.get();
        WRITTEN.remove();
        return commit != null && commit.path().equals(new Path(url)) ? commit.content() : null;
    }

    @Override
    public Boolean isPartialWriteVisible(Path path, Configuration hadoopConf) {
        return false;
    }

    /**
     * A page at a time: Hadoop's own listing is of the whole log before its first file is given, and at each checkpoint Delta looks
     * at the oldest few, to clean up.
     */
    @Override
    public Iterator<FileStatus> listFrom(Path path, Configuration hadoopConf) throws IOException {
        FileSystem fileSystem = path.getFileSystem(hadoopConf);
        return isListedInOrder(fileSystem) ? new Listing(fileSystem, path) : super.listFrom(path, hadoopConf);
    }

    /** A directory bucket of S3 Express gives names in no order. */
    private static boolean isListedInOrder(FileSystem fileSystem) {
        String bucket = fileSystem.getUri().getHost();
        return isS3A(fileSystem) && bucket != null && !bucket.endsWith("--x-s3");
    }

    static boolean isS3A(FileSystem fileSystem) {
        return fileSystem.getClass().getName().equals(S3A);
    }

    /** Files one after the other, the next of which is found when the one before is taken. */
    abstract static class FileListing implements Iterator<FileStatus> {
        private FileStatus next;

        /** The file behind the last one; null behind the last of all. */
        abstract FileStatus following() throws IOException;

        /** To be called once what `following` needs is there. */
        final void advance() throws IOException {
            next = following();
        }

        @Override
        public final boolean hasNext() {
            return next != null;
        }

        @Override
        public final FileStatus next() {
            if (next == null) {
                throw new NoSuchElementException();
            }
            FileStatus found = next;
            try {
                advance();
            } catch (IOException error) {
                throw new UncheckedIOException(error);
            }
            return found;
        }
    }

    /** The files of a folder from a name on. */
    private static final class Listing extends FileListing {
        private final RemoteIterator<FileStatus> pages;
        private final String from;

        Listing(FileSystem fileSystem, Path path) throws IOException {
            pages = fileSystem.listStatusIterator(path.getParent());
            from = path.getName();
            advance();
        }

        @Override
        FileStatus following() throws IOException {
            while (pages.hasNext()) {
                FileStatus found = pages.next();
                if (found.getPath().getName().compareTo(from) >= 0) {
                    return found;
                }
            }
            return null;
        }
    }

    /**
     * S3 answers 409 to a conditional PUT while another request for the object is at work, which may be an earlier try of this one: who
     * wins is known when it is repeated. S3A takes the answer for a bad request, and does not repeat it.
     */
    private static void decided(FileSystem fileSystem, Path path, byte[] content, boolean overwrite) throws IOException {
        for (int attempt = 0; ; attempt++) {
            try {
                put(fileSystem, path, content, overwrite);
                return;
            } catch (IOException error) {
                if (attempt == REPEATED || !isUndecided(error)) {
                    throw error;
                }
                pause(100L << attempt);
            }
        }
    }

    private static void pause(long milliseconds) throws IOException {
        try {
            Thread.sleep(milliseconds);
        } catch (InterruptedException interrupt) {
            Thread.currentThread().interrupt();
            throw new InterruptedIOException();
        }
    }

    /** Whether the store answered 409; read by reflection, because these sources are compiled without the file system. */
    private static boolean isUndecided(Throwable error) {
        for (Throwable each = error; each != null; each = each.getCause()) {
            try {
                if (each.getClass().getMethod("statusCode").invoke(each) instanceof Integer status && status == 409) {
                    return true;
                }
            } catch (ReflectiveOperationException other) {
                continue;  // not an exception with a status
            }
        }
        return false;
    }

    private static void put(FileSystem fileSystem, Path path, byte[] content, boolean overwrite) throws IOException {
        var builder = fileSystem.createFile(path).overwrite(true).recursive();
        if (!overwrite) {
            builder.must(CONDITIONAL, true);
        }
        try (FSDataOutputStream out = builder.build()) {
            out.write(content);
        }
    }

    /** Whether the store refused the PUT because the object exists (412), in the words of either file system. */
    private static boolean isThere(Throwable error) {
        for (Throwable each = error; each != null; each = each.getCause()) {
            String name = each.getClass().getSimpleName();
            if (name.equals("RemoteFileChangedException") || name.equals("FileAlreadyExistsException")) {
                return true;
            }
        }
        return false;
    }

    private static boolean holds(FileSystem fileSystem, Path path, byte[] content) throws IOException {
        byte[] held = new byte[content.length];
        try (DataInputStream in = fileSystem.open(path)) {
            in.readFully(held);
            return in.read() < 0 && Arrays.equals(held, content);
        } catch (FileNotFoundException | java.io.EOFException error) {
            return false;
        }
    }

    static byte[] lines(Iterator<String> actions) throws IOException {
        ByteArrayOutputStream lines = new ByteArrayOutputStream();
        while (actions.hasNext()) {
            lines.write(actions.next().getBytes(StandardCharsets.UTF_8));
            lines.write('\n');
        }
        return lines.toByteArray();
    }
}
